"""Triton kernels for topic models: rows of B, inference of documents, steps of the topics, likelihoods.

One program infers one document without a word to the host, in three stages, a kernel each, so that none pays for the
registers of another. `begin_kernel` reads all topics of the document's words in every iteration, tile by tile;
both sums of an iteration (over topics for the words' shares, over words for the topics) use a tile while it is in
registers. Topics that hold less than 1e-4 words of the document leave, as in the compiled kernels (`kernels.py`).
When at most ``CAP`` are left, `few_kernel` gathers those columns into registers once and iterates there: no memory
is read until the document has converged. `finish_kernel` looks at all topics once more; if one that left would take
more than 1e-3 words, it goes on with all topics.

`step_kernel` adds a mini-batch to the topics: a program owns one word, sums over the word's entries in the
mini-batch (sorted beforehand), and writes the word's row. No atomic additions, so equal seeds give equal bits.

Everything is float32 but the sums over words of the topics and the likelihoods. Tested against the float64
oracle and the torch path: in Triton's interpreter on a CPU, and on a GPU where there is one.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _digamma(x):
    """ψ(x) for x > 0: Stirling's series at x + 6, and six fractions down again."""
    y = x + 6.0
    w = 1.0 / (y * y)
    series = w * (0.08333333333333333 - w * (0.008333333333333333 - w * (0.003968253968253968 - w / 240.0)))
    a, b, c = x * (x + 5.0), (x + 1.0) * (x + 4.0), (x + 2.0) * (x + 3.0)
    return tl.log(y) - 0.5 / y - series - (2.0 * x + 5.0) * (1.0 / a + 1.0 / b + 1.0 / c)


@triton.jit
def _power(gamma, COLLAPSED: tl.constexpr):
    """exp(ψ(γ)); collapsed: γ."""
    if COLLAPSED:
        value = gamma
    else:
        value = tl.exp(_digamma(gamma))
    return value


@triton.jit
def rows_kernel(
    excess, column, rows, floors, scales, V, K, width, prior, scale, eps,
    COLLAPSED: tl.constexpr, HAS_EPS: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """B of every word over its largest element, the logarithm of that element, and eps in units of it."""
    ks = tl.arange(0, K_PAD)
    words = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = words.to(tl.int64)[:, None] * width + ks[None, :]
    inside = (words < V)[:, None] & (ks < width)[None, :]
    live = (ks < K)[None, :]
    mass = prior * V
    sums = mass + scale * tl.load(column + ks, mask=ks < K, other=0.0)
    # Races of lock-free threads may leave a sum a little off, before the topics came here.
    sums = tl.where(ks < K, tl.maximum(sums, 1e-3 * mass), 1.0)
    values = prior + scale * tl.load(excess + at, mask=inside, other=0.0)
    if COLLAPSED:
        values = tl.where(live, values / sums.to(tl.float32)[None, :], 0.0)
        top = tl.max(values, 1) + 1e-30
        values = values / top[:, None]
        logs = tl.log(top)
    else:
        values = _digamma(values) - _digamma(sums).to(tl.float32)[None, :]
        values = tl.where(live, values, -float("inf"))
        logs = tl.max(values, 1)
        values = tl.exp(values - logs[:, None])
    tl.store(rows + at, values, mask=inside)
    tl.store(scales + words, logs, mask=words < V)
    if HAS_EPS:
        tl.store(floors + words, tl.minimum(eps * tl.exp(tl.minimum(-logs, 80.0)), 1e30), mask=words < V)


@triton.jit
def _sweep(
    indices, counts, floors, rows, shares, lo, n, mass, e, columns, there, width,
    HAS_EPS: tl.constexpr, WRITE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ_w share_w B_wk with share_w = count_w / Σ_k e_k B_wk, over the words of one document."""
    sums = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        word = tl.load(indices + lo + i, mask=i < n, other=0)
        count = tl.load(counts + lo + i, mask=i < n, other=0.0)
        at = word.to(tl.int64)[:, None] * width + columns[None, :]
        b = tl.load(rows + at, mask=(i < n)[:, None] & there[None, :], other=0.0)
        total = tl.sum(b * e[None, :], 1) + 1e-30
        if HAS_EPS:
            total += mass * tl.load(floors + word, mask=i < n, other=0.0)
        share = count / total
        if WRITE:
            tl.store(shares + lo + i, share, mask=i < n)
        sums += share[:, None] * b
    return tl.sum(sums, 0)


@triton.jit
def _place(indptr, order, first):
    """The document of this program: (its number in the mini-batch, where its entries begin, how many)."""
    local = tl.load(order + tl.program_id(0)).to(tl.int64)
    lo = tl.load(indptr + first + local)
    return local, lo, (tl.load(indptr + first + local + 1) - lo).to(tl.int32)


@triton.jit
def _mass(counts, lo, n, prior_mass, HAS_EPS: tl.constexpr):
    """Σ of the prior and of the document's counts, where it is needed."""
    mass = tl.full((), 0.0, tl.float32) + prior_mass
    if HAS_EPS:
        for start in range(0, n, 256):
            i = start + tl.arange(0, 256)
            mass += tl.sum(tl.load(counts + lo + i, mask=i < n, other=0.0), 0)
    return mass


@triton.jit
def _rounds(
    indices, counts, floors, rows, shares, lo, n, mass, gamma, prior, mask, moved, rounds, least_words, K, width,
    enough, max_iter, stay_above,
    COLLAPSED: tl.constexpr, HAS_EPS: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Iterate with all topics that have not left, until convergence or until no more than ``stay_above`` are left.

    Topics with less than ``least_words`` words leave.
    """
    ks = tl.arange(0, K_PAD)
    live = tl.sum(mask, 0).to(tl.int32)
    while (moved >= enough) & (rounds < max_iter) & (live > stay_above):
        e = _power(gamma, COLLAPSED) * mask
        words = e * _sweep(
            indices, counts, floors, rows, shares, lo, n, mass, e, ks, ks < width, width, HAS_EPS, False, TILE, K_PAD,
        )  # fmt: skip
        new = tl.where(mask > 0.0, prior + words, gamma)
        moved = tl.sum(tl.abs(new - gamma), 0)
        gamma = new
        rounds += 1
        most = tl.max(words, 0)
        leaves = words < tl.where(most >= least_words, least_words, 0.0)
        mask = tl.where(leaves, 0.0, mask)
        live = tl.sum(mask, 0).to(tl.int32)
    return gamma, mask, moved, rounds


@triton.jit(do_not_specialize=["first", "max_iter", "noise", "K"])
def begin_kernel(
    indptr, indices, counts, order, rows, floors, alpha, jumps, gammas, powers, moved_out, rounds_out,
    first, K, width, enough, prior_mass, max_iter, noise,
    COLLAPSED: tl.constexpr, HAS_EPS: tl.constexpr, HAS_NOISE: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """The first stage. ``powers`` gets 1 for topics that stay, 0 for those that left."""
    local, lo, n = _place(indptr, order, first)
    ks = tl.arange(0, K_PAD)
    inside = ks < K
    prior = tl.load(alpha + ks, mask=inside, other=1.0)
    mass = _mass(counts, lo, n, prior_mass, HAS_EPS)
    gamma = tl.full((K_PAD,), 1.0, dtype=tl.float32)
    if HAS_NOISE:
        # The compiled kernels' generator: draw k is a_k × start + c_k modulo 2³².
        draw = noise.to(tl.uint32) + (first + local + 1).to(tl.uint32) * tl.full((), 2654435761, tl.uint32)
        a = tl.load(jumps + ks, mask=inside, other=0).to(tl.uint32)
        c = tl.load(jumps + K + ks, mask=inside, other=0).to(tl.uint32)
        # A deviation of a tenth, from numbers that are uniform.
        gamma += 0.34641016151377546 * ((a * draw + c).to(tl.float32) * 2.3283064365386963e-10 - 0.5)
    mask = tl.where(inside, 1.0, 0.0)
    moved = tl.full((), 0.0, tl.float32) + enough
    rounds, least_words = tl.full((), 0, tl.int32), tl.full((), 1e-4, tl.float32)
    gamma, mask, moved, rounds = _rounds(
        indices, counts, floors, rows, moved_out, lo, n, mass, gamma, prior, mask, moved, rounds, least_words, K, width,
        enough, max_iter, CAP, COLLAPSED, HAS_EPS, K_PAD, TILE,
    )  # fmt: skip
    tl.store(gammas + local * K + ks, gamma, mask=inside)
    tl.store(powers + local * width + ks, mask, mask=ks < width)
    tl.store(moved_out + local, moved)
    tl.store(rounds_out + local, rounds)


@triton.jit(do_not_specialize=["first", "max_iter", "K"])
def few_kernel(
    indptr, indices, counts, order, rows, floors, alpha, gammas, powers, moved_out, rounds_out,
    first, K, width, enough, prior_mass, max_iter,
    COLLAPSED: tl.constexpr, HAS_EPS: tl.constexpr, K_PAD: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """The second stage: the topics that stayed, to convergence. With SINGLE a document fits into one block."""
    local, lo, n = _place(indptr, order, first)
    moved, rounds = tl.load(moved_out + local), tl.load(rounds_out + local)
    if (moved >= enough) & (rounds < max_iter):
        mass = _mass(counts, lo, n, prior_mass, HAS_EPS)
        ks, cs = tl.arange(0, K_PAD), tl.arange(0, CAP)
        mask = tl.load(powers + local * width + ks, mask=ks < width, other=0.0)
        place = tl.cumsum(mask, 0) - 1.0
        hit = (place[None, :] == cs[:, None].to(tl.float32)) & (mask > 0.0)[None, :]
        columns = tl.sum(tl.where(hit, ks[None, :], 0), 1)
        there = cs < tl.sum(mask, 0).to(tl.int32)
        g = tl.load(gammas + local * K + columns, mask=there, other=1.0)
        prior = tl.load(alpha + columns, mask=there, other=1.0)
        i = tl.arange(0, BLOCK)
        if SINGLE:
            word = tl.load(indices + lo + i, mask=i < n, other=0)
            count = tl.load(counts + lo + i, mask=i < n, other=0.0)
            # Topics × words: a thread then holds all topics of its words, and sums over them alone.
            at = word.to(tl.int64)[None, :] * width + columns[:, None]
            b = tl.load(rows + at, mask=there[:, None] & (i < n)[None, :], other=0.0)
            least = tl.full((BLOCK,), 1e-30, dtype=tl.float32)
            if HAS_EPS:
                least += mass * tl.load(floors + word, mask=i < n, other=0.0)
            while (moved >= enough) & (rounds < max_iter):
                e = tl.where(there, _power(g, COLLAPSED), 0.0)
                share = count / (tl.sum(b * e[:, None], 0) + least)
                new = tl.where(there, prior + e * tl.sum(share[None, :] * b, 1), g)
                moved = tl.sum(tl.abs(new - g), 0)
                g = new
                rounds += 1
        else:
            while (moved >= enough) & (rounds < max_iter):
                e = tl.where(there, _power(g, COLLAPSED), 0.0)
                words = e * _sweep(
                    indices, counts, floors, rows, moved_out, lo, n, mass, e, columns, there, width,
                    HAS_EPS, False, 64, CAP,
                )  # fmt: skip
                new = tl.where(there, prior + words, g)
                moved = tl.sum(tl.abs(new - g), 0)
                g = new
                rounds += 1
        tl.store(gammas + local * K + columns, g, mask=there)
        tl.store(moved_out + local, moved)
        tl.store(rounds_out + local, rounds)


@triton.jit(do_not_specialize=["first", "max_iter", "K"])
def finish_kernel(
    indptr, indices, counts, order, rows, floors, alpha, gammas, powers, shares, moved_in, rounds_out,
    first, K, width, enough, prior_mass, max_iter,
    COLLAPSED: tl.constexpr, HAS_EPS: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Look at the topics that left; then γ, e and the words' shares are final."""
    local, lo, n = _place(indptr, order, first)
    ks = tl.arange(0, K_PAD)
    inside, stored = ks < K, ks < width
    prior = tl.load(alpha + ks, mask=inside, other=1.0)
    gamma = tl.load(gammas + local * K + ks, mask=inside, other=1.0)
    mask = tl.load(powers + local * width + ks, mask=stored, other=0.0)
    mass = _mass(counts, lo, n, prior_mass, HAS_EPS)
    moved, rounds = tl.load(moved_in + local), tl.load(rounds_out + local)
    looking = tl.full((), 1, tl.int32)
    while looking == 1:
        e = _power(gamma, COLLAPSED)
        sums = _sweep(
            indices, counts, floors, rows, shares, lo, n, mass, e * mask, ks, stored, width,
            HAS_EPS, True, TILE, K_PAD,
        )  # fmt: skip
        missed = tl.max(tl.where(inside & (mask == 0.0), e * sums, 0.0), 0)
        looking = ((missed > 1e-3) & (moved < enough) & (rounds < max_iter)).to(tl.int32)
        if looking == 1:
            # Everybody is back, and nobody leaves any more.
            mask = tl.where(inside, 1.0, 0.0)
            gamma, mask, moved, rounds = _rounds(
                indices, counts, floors, rows, shares, lo, n, mass, gamma, prior, mask, moved * 0.0 + enough, rounds,
                moved * 0.0, K, width, enough, max_iter, 0, COLLAPSED, HAS_EPS, K_PAD, TILE,
            )  # fmt: skip
    if n == 0:
        gamma = prior
    tl.store(gammas + local * K + ks, gamma, mask=inside)
    tl.store(powers + local * width + ks, _power(gamma, COLLAPSED) * mask, mask=stored)
    tl.store(rounds_out + local, tl.where(n > 0, rounds, 0))


@triton.jit(do_not_specialize=["begin"])
def step_kernel(
    words, starts, entries, docs, shares, powers, rows, excess, begin, factor, width,
    K_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """excess_w += factor × B_w Σ share × e, over the entries of one word."""
    ks = tl.arange(0, K_PAD)
    stored = ks < width
    u = begin + tl.program_id(0)
    word = tl.load(words + u).to(tl.int64)
    lo = tl.load(starts + u)
    n = (tl.load(starts + u + 1) - lo).to(tl.int32)
    sums = tl.zeros((TILE, K_PAD), dtype=tl.float32)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        entry = tl.load(entries + lo + i, mask=i < n, other=0)
        share = tl.load(shares + entry, mask=i < n, other=0.0)
        doc = tl.load(docs + lo + i, mask=i < n, other=0).to(tl.int64)
        at = doc[:, None] * width + ks[None, :]
        sums += share[:, None] * tl.load(powers + at, mask=(i < n)[:, None] & stored[None, :], other=0.0)
    at = word * width + ks
    part = tl.sum(sums, 0) * tl.load(rows + at, mask=stored, other=0.0)
    tl.store(excess + at, tl.load(excess + at, mask=stored, other=0.0) + factor * part, mask=stored)


@triton.jit(do_not_specialize=["first"])
def likelihood_kernel(
    indptr, indices, counts, rows, scales, powers, out, first, width, K_PAD: tl.constexpr, TILE: tl.constexpr
):
    """Σ over the words of one document of count × log(scale_w Σ_k powers_k rows_wk), in float64."""
    local = tl.program_id(0).to(tl.int64)
    lo = tl.load(indptr + first + local)
    n = (tl.load(indptr + first + local + 1) - lo).to(tl.int32)
    ks = tl.arange(0, K_PAD)
    stored = ks < width
    p = tl.load(powers + local * width + ks, mask=stored, other=0.0)
    value = tl.zeros((TILE,), dtype=tl.float64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        word = tl.load(indices + lo + i, mask=i < n, other=0)
        count = tl.load(counts + lo + i, mask=i < n, other=0.0)
        at = word.to(tl.int64)[:, None] * width + ks[None, :]
        b = tl.load(rows + at, mask=(i < n)[:, None] & stored[None, :], other=0.0)
        inner = tl.log(tl.sum(b * p[None, :], 1) + 1e-30) + tl.load(scales + word, mask=i < n, other=0.0)
        value += tl.where(i < n, count * inner, 0.0).to(tl.float64)
    tl.store(out + local, tl.sum(value, 0))
