"""The E-step and the local step of a topic model, compiled: no Python and no interpreter lock inside.

One call of `learn` does for a run of documents what the notes call a step of the local level: it copies the
rows of the topics that these documents use, infers each document, and returns the statistics that the caller
then adds to the shared topics with `apply`. The copy serves twice: the statistics are multiplied by the same
rows that the inference used, whatever other threads write meanwhile.

Layout. Topics are V × K float32, K padded to a multiple of 16 with zeros in the rows' use (`rows`). A
document is copied topic by topic, K × n words, n padded to 16: both products of an iteration then run along
words or sum along words, and a topic can be left out of the work without moving anything.

Topics leave. A topic whose share of a document falls below `DROP` words stops being computed; when the
document has converged, all topics left out are computed once, and if one holds more than `REVIVE` words the
iteration goes on with all of them. With the usual priors, 1/K, five to fifteen of a hundred topics stay.

The test for convergence is scikit-learn's: the mean over all K topics of |change of γ| below `tol`.

Denormals are zero in here (`headrace.engine.denormals`): under the usual priors half of B = exp(E[log β]) and many of
its products would be, exp(ψ(1/100)) being 1e-44. No row, power or statistic is one afterwards.

Everything is float32; sums over a document's words are short, so the result differs from float64 by about
1e-5 of γ. Each function's arrays are its caller's; nothing here allocates in proportion to the documents.
"""

from __future__ import annotations

import numpy as np

from headrace.engine.denormals import flush_denormals, restore
from headrace.engine.tiles import address
from headrace.topics.compiled import jit
from headrace.topics.vector import (
    add,
    broadcast,
    digamma_power,
    distance,
    div,
    exp_digamma,
    fma,
    index_at,
    larger,
    largest,
    load,
    mul,
    number_at,
    put_index,
    put_number,
    splat,
    store,
    store_totals,
    total,
    transpose,
)

DROP = np.float32(1e-4)
REVIVE = np.float32(1e-3)
SPREAD = np.float32(0.1 * 12.0**0.5)
"""γ starts uniform around one with the deviation of scikit-learn's draws, a tenth."""
NOTHING = np.float32(1e-30)
"""A floor under every sum that is divided by: far below any share, above float32's denormals."""


@jit
def localise(indptr, indices, first, last, slot, words, locs, starts):
    """Number the distinct words of documents first..last; returns how many there are.

    ``slot`` (V, all −1 before and after) maps word → local number, ``words`` the other way, and ``locs``
    holds the local number of every entry of the documents. The entries of local word u, in the order of the
    documents, will be numbers starts[u] to starts[u + 1].
    """
    used = 0
    begin = indptr[first]
    for i in range(begin, indptr[last]):
        word = indices[i]
        u = slot[word]
        if u < 0:
            u = slot[word] = used
            words[u] = word
            starts[u + 1] = 0
            used += 1
        locs[i - begin] = u
        starts[u + 1] += 1
    starts[0] = 0
    for u in range(used):
        slot[words[u]] = -1
        starts[u + 1] += starts[u]
    return used


@jit
def fill_rows(excess, scale, prior, inverse, words, used, width, collapsed, eps, rows, floors, scales):
    """The rows of exp(E[log β]) of the given words, each divided by its largest element.

    λ = prior + scale × excess; ``inverse`` holds 1 / exp(ψ(Σ_v λ_vk)) (collapsed: 1 / Σ_v λ_vk), zero in the
    padding. Powers of e are taken relative to that of the row's largest λ, so that no row underflows to zeros.
    ``scales`` is the logarithm of what the row was divided by, and ``floors`` is eps in units of it: the
    constant that scikit-learn adds to every word's sum.
    """
    mode = flush_denormals()
    times, priors, zero = splat(np.float32(scale)), splat(np.float32(prior)), splat(np.float32(0.0))
    for u in range(used):
        at, to = words[u] * width, u * width
        top = shift = zero
        if collapsed:
            for k in range(0, width, 16):
                value = mul(fma(times, load(excess, at + k), priors), load(inverse, k))
                store(rows, to + k, value)
                top = larger(top, value)
        else:
            most = zero
            for k in range(0, width, 16):
                value = fma(times, load(excess, at + k), priors)
                store(rows, to + k, value)
                most = larger(most, value)
            shift = digamma_power(splat(largest(most)))
            for k in range(0, width, 16):
                value = mul(exp_digamma(load(rows, to + k), shift), load(inverse, k))
                store(rows, to + k, value)
                top = larger(top, value)
        largest_value = largest(top) + NOTHING
        factor = splat(np.float32(1.0) / largest_value)
        for k in range(0, width, 16):
            store(rows, to + k, mul(load(rows, to + k), factor))
        scales[u] = np.log(largest_value) - largest(shift)
        floors[u] = np.float32(min(eps * np.exp(-np.float64(scales[u])), 1e30))
    restore(mode)


@jit
def _shares(block, offsets, e, live, floor, count, share, padded):
    """share_w = count_w / (floor_w + Σ_k e_k B_wk), for 32 words at a time.

    Four topics at a time: eight sums that do not wait for one another fill the multipliers' latency.
    """
    zero = splat(np.float32(0.0))
    for w in range(0, padded - 16, 32):
        a, b, c, d = load(floor, w), load(floor, w + 16), zero, zero
        g = h = m = n = zero
        for i in range(0, live, 4):
            p, q = index_at(offsets, i) + w, index_at(offsets, i + 1) + w
            r, s = index_at(offsets, i + 2) + w, index_at(offsets, i + 3) + w
            x, y = broadcast(e, i), broadcast(e, i + 1)
            a, b = fma(x, load(block, p), a), fma(x, load(block, p + 16), b)
            c, d = fma(y, load(block, q), c), fma(y, load(block, q + 16), d)
            x, y = broadcast(e, i + 2), broadcast(e, i + 3)
            g, h = fma(x, load(block, r), g), fma(x, load(block, r + 16), h)
            m, n = fma(y, load(block, s), m), fma(y, load(block, s + 16), n)
        store(share, w, div(load(count, w), add(add(a, c), add(g, m))))
        store(share, w + 16, div(load(count, w + 16), add(add(b, d), add(h, n))))
    if padded & 16:
        w = padded - 16
        a, c, g, m = load(floor, w), zero, zero, zero
        for i in range(0, live, 4):
            a = fma(broadcast(e, i), load(block, index_at(offsets, i) + w), a)
            c = fma(broadcast(e, i + 1), load(block, index_at(offsets, i + 1) + w), c)
            g = fma(broadcast(e, i + 2), load(block, index_at(offsets, i + 2) + w), g)
            m = fma(broadcast(e, i + 3), load(block, index_at(offsets, i + 3) + w), m)
        store(share, w, div(load(count, w), add(add(a, c), add(g, m))))


@jit
def _sums(block, offsets, live, share, padded, sums):
    """sums_k = Σ_w share_w B_wk, four topics at a time."""
    for i in range(0, live, 4):
        p, q, r, s = (
            index_at(offsets, i),
            index_at(offsets, i + 1),
            index_at(offsets, i + 2),
            index_at(offsets, i + 3),
        )
        a = b = c = d = splat(np.float32(0.0))
        for w in range(0, padded, 16):
            x = load(share, w)
            a, b = fma(x, load(block, p + w), a), fma(x, load(block, q + w), b)
            c, d = fma(x, load(block, r + w), c), fma(x, load(block, s + w), d)
        store_totals(sums, i, a, b, c, d)


@jit
def _powers(gamma, mask, e, live, collapsed):
    """e_k = exp(ψ(γ_k)) (collapsed: γ_k), zero in the padding."""
    zero = splat(np.float32(0.0))
    for i in range(0, live, 16):
        g = load(gamma, i)
        if not collapsed:
            g = exp_digamma(g, zero)
        store(e, i, mul(g, load(mask, i)))


@jit
def _pad(live, offsets, gamma, prior, mask):
    """Make everything behind the live topics harmless, up to a multiple of 16."""
    for i in range(live, (live + 15) // 16 * 16):
        put_index(offsets, i, 0)
        put_number(gamma, i, np.float32(1.0))
        put_number(prior, i, np.float32(1.0))
        put_number(mask, i, np.float32(0.0))


@jit
def _admit(k_topics, stride, alpha, full, topics, offsets, gamma, prior, mask):
    """All topics are live."""
    for k in range(k_topics):
        put_index(topics, k, k)
        put_index(offsets, k, k * stride)
        put_number(gamma, k, number_at(full, k))
        put_number(prior, k, number_at(alpha, k))
        put_number(mask, k, np.float32(1.0))
    _pad(k_topics, offsets, gamma, prior, mask)


@jit
def _drop(live, left, topics, offsets, gamma, prior, mask, words, full, out):
    """Let topics with less than `DROP` words leave; returns (live, left). The order of the others stays.

    Written without branches: which topics leave is unpredictable, and every wrong guess costs as much as
    several topics.
    """
    kept = 0
    for i in range(live):
        k, g = index_at(topics, i), number_at(gamma, i)
        stays = 1 if number_at(words, i) >= DROP else 0
        put_number(full, k, g)
        put_index(out, left, k)
        left += 1 - stays
        put_index(topics, kept, k)
        put_index(offsets, kept, index_at(offsets, i))
        put_number(gamma, kept, g)
        put_number(prior, kept, number_at(prior, i))
        kept += stays
    _pad(kept, offsets, gamma, prior, mask)
    return kept, left


@jit
def _keep(live, topics, gamma, full):
    """Write γ of the live topics back to their places."""
    for i in range(live):
        put_number(full, index_at(topics, i), number_at(gamma, i))


@jit
def _revived(block, padded, out, left, full, collapsed, share, offsets, gamma, e, mask, sums):
    """Whether a topic that left would take more than `REVIVE` words if it were let in."""
    for i in range((left + 15) // 16 * 16):
        k = index_at(out, i) if i < left else 0
        put_index(offsets, i, k * padded)
        put_number(gamma, i, number_at(full, k))
        put_number(mask, i, np.float32(1.0) if i < left else np.float32(0.0))
    _powers(gamma, mask, e, left, collapsed)
    _sums(block, offsets, left, share, padded, sums)
    most = np.float32(0.0)
    for i in range(left):
        most = max(most, number_at(e, i) * number_at(sums, i))
    return most > REVIVE


@jit
def _infer(block, padded, k_topics, alpha, full, tol, max_iter, collapsed, ints, work, floor, count, share):
    """Iterate one document to convergence. ``full`` is γ, in and out; returns (live topics, iterations).

    Everything but the numbers is an address; ``ints`` and ``work`` are those of the rows of `Scratch`'s
    arrays. Afterwards the live topics are named in ``ints[0]``, their e is in ``work[1]``, and ``share`` holds
    the words' shares under that e.
    """
    topics, offsets, others, _, out = ints
    gamma, e, prior, mask, sums, gamma2, e2, mask2, sums2, _ = work
    _admit(k_topics, padded, alpha, full, topics, offsets, gamma, prior, mask)
    _powers(gamma, mask, e, k_topics, collapsed)
    live, left, may_drop, rounds = k_topics, 0, True, 0
    enough = tol * np.float32(k_topics)
    while rounds < max_iter:
        _shares(block, offsets, e, live, floor, count, share, padded)
        _sums(block, offsets, live, share, padded, sums)
        moved = most = splat(np.float32(0.0))
        for i in range(0, live, 16):
            words = mul(mul(load(e, i), load(sums, i)), load(mask, i))
            store(sums, i, words)
            most = larger(most, words)
            new = add(load(prior, i), words)
            moved = add(moved, distance(new, load(gamma, i)))
            store(gamma, i, new)
        rounds += 1
        converged = total(moved) < enough
        if may_drop and (rounds < 8 or rounds & 1 == 0) and largest(most) >= DROP:
            live, left = _drop(live, left, topics, offsets, gamma, prior, mask, sums, full, out)
        _powers(gamma, mask, e, live, collapsed)
        if not converged:
            continue
        if left == 0:
            break
        _shares(block, offsets, e, live, floor, count, share, padded)
        if not _revived(block, padded, out, left, full, collapsed, share, others, gamma2, e2, mask2, sums2):
            _keep(live, topics, gamma, full)
            return live, rounds
        _keep(live, topics, gamma, full)
        live, left, may_drop = k_topics, 0, False
        _admit(k_topics, padded, alpha, full, topics, offsets, gamma, prior, mask)
        _powers(gamma, mask, e, live, collapsed)
    _keep(live, topics, gamma, full)
    _shares(block, offsets, e, live, floor, count, share, padded)
    return live, rounds


@jit
def _rows_of(table):
    """The addresses of the rows of a table of four-byte numbers."""
    start, step = address(table), table.shape[1] * 4
    return start, start + step, start + 2 * step, start + 3 * step, start + 4 * step


@jit
def learn(
    indptr, counts, first, last, locs, rows, floors, width, alpha, tol, max_iter, collapsed, gammas,
    want_stats, starts, cursor, powers, entry_doc, entry_share, ints, work, block, lines, noise,
):  # fmt: skip
    """Infer documents first..last from local ``rows``.

    γ starts at 1, as in scikit-learn's transform; near 1 when ``noise`` is not zero, as in its fit: the same
    noise gives the same starts, whatever thread asks. Fills ``gammas``; when statistics are wanted, also
    ``powers`` (e of every document, zero for topics that
    left) and, word by word, ``entry_doc`` and ``entry_share``: what `gather_statistics` needs. Returns the
    iterations of all documents together.
    """
    mode = flush_denormals()
    k_topics = alpha.size
    prior_mass = np.float32(alpha.sum())
    ints_at, line_at = _rows_of(ints), _rows_of(lines)
    work_at = _rows_of(work[:5]) + _rows_of(work[5:])
    topics, where, e, full = ints_at[0], ints_at[3], work_at[1], work_at[9]
    floor, count, share = line_at[0], line_at[1], line_at[2]
    block_at, alpha_at, rows_at, locs_at = address(block), address(alpha), address(rows), address(locs)
    cursor_at, doc_at, share_at = address(cursor), address(entry_doc), address(entry_share)
    counts_at, floors_at, powers_at = address(counts), address(floors), address(powers)
    base, rounds = indptr[first], 0
    if want_stats:
        powers[: (last - first) * width] = np.float32(0.0)
        for u in range(cursor.size):
            cursor[u] = starts[u]
    for doc in range(first, last):
        lo, n = indptr[doc] - base, indptr[doc + 1] - indptr[doc]
        if n == 0:
            for k in range(k_topics):
                gammas[doc - first, k] = alpha[k]
            continue
        padded = (n + 15) // 16 * 16
        mass = prior_mass
        for j in range(n):
            mass += number_at(counts_at, base + lo + j)
        for j in range(n):
            u = index_at(locs_at, lo + j)
            put_index(where, j, u * width)
            put_number(count, j, number_at(counts_at, base + lo + j))
            # e is not divided by exp(ψ(Σγ)), so the floor is multiplied by it.
            put_number(floor, j, number_at(floors_at, u) * mass + NOTHING)
        for j in range(n, padded):
            put_index(where, j, 0)
            put_number(count, j, np.float32(0.0))
            put_number(floor, j, np.float32(1.0))
        for w in range(0, padded, 16):
            for k in range(0, width, 16):
                transpose(rows_at, where, w, k, block_at, k * padded + w, padded)
        draw = (noise + (doc + 1) * 2654435761) & 0xFFFFFFFF
        for k in range(k_topics):
            if noise:
                # A linear congruential generator: its high bits are random enough to tell topics apart.
                draw = (draw * 747796405 + 2891336453) & 0xFFFFFFFF
                put_number(full, k, np.float32(1.0) + SPREAD * np.float32(draw * 2.0**-32 - 0.5))
            else:
                put_number(full, k, np.float32(1.0))
        live, used = _infer(
            block_at, padded, k_topics, alpha_at, full, tol, max_iter, collapsed, ints_at, work_at, floor,
            count, share,
        )  # fmt: skip
        rounds += used
        for k in range(k_topics):
            gammas[doc - first, k] = number_at(full, k)
        if want_stats:
            row = (doc - first) * width
            for i in range(live):
                put_number(powers_at, row + index_at(topics, i), number_at(e, i))
            for j in range(n):
                u = index_at(locs_at, lo + j)
                at = index_at(cursor_at, u)
                put_index(cursor_at, u, at + 1)
                put_index(doc_at, at, doc - first)
                put_number(share_at, at, number_at(share, j))
    restore(mode)
    return rounds


@jit
def gather_statistics(rows, used, width, starts, entry_doc, entry_share, powers):
    """Turn ``rows`` into statistics: B_wk Σ_d share_dw e_dk, word by word.

    The other order, document by document, would visit a cache line of a table as large as ``rows`` for every
    word of every document, and need that table.
    """
    mode = flush_denormals()
    zero = splat(np.float32(0.0))
    rows_at, doc_at, share_at = address(rows), address(entry_doc), address(entry_share)
    powers_at = address(powers)
    for u in range(used):
        lo, hi, to = starts[u], starts[u + 1], u * width
        for k in range(0, width - 16, 32):
            a = b = zero
            for i in range(lo, hi):
                at, x = index_at(doc_at, i) * width + k, broadcast(share_at, i)
                a, b = fma(x, load(powers_at, at), a), fma(x, load(powers_at, at + 16), b)
            store(rows_at, to + k, mul(a, load(rows_at, to + k)))
            store(rows_at, to + k + 16, mul(b, load(rows_at, to + k + 16)))
        if width & 16:
            k, a = width - 16, zero
            for i in range(lo, hi):
                a = fma(broadcast(share_at, i), load(powers_at, index_at(doc_at, i) * width + k), a)
            store(rows_at, to + k, mul(a, load(rows_at, to + k)))
    restore(mode)


@jit
def apply(excess, words, used, width, stats, factor, column):
    """excess[word] += factor × stats for the words used, without a lock; ``column`` gets the sums."""
    mode = flush_denormals()
    times = splat(np.float32(factor))
    column[:] = 0.0
    for u in range(used):
        at, to = words[u] * width, u * width
        for k in range(0, width, 16):
            store(excess, at + k, fma(times, load(stats, to + k), load(excess, at + k)))
        for k in range(width):
            column[k] += stats[to + k]
    restore(mode)


@jit
def word_likelihood(indptr, counts, first, last, locs, rows, scales, width, powers):
    """Σ over documents first..last of count × log(scale_w Σ_k powers_dk rows_wk), in float64.

    With ``powers`` = exp(E[log θ]) this is the words' part of the bound; with ``powers`` = E[θ] and rows of
    E[β] it is the log likelihood of the words. ``scales`` holds the logarithm of what each row was divided
    by.
    """
    mode = flush_denormals()
    base, value = indptr[first], 0.0
    for doc in range(first, last):
        for i in range(indptr[doc], indptr[doc + 1]):
            u = locs[i - base]
            inner = splat(np.float32(0.0))
            for k in range(0, width, 16):
                inner = fma(load(powers, (doc - first) * width + k), load(rows, u * width + k), inner)
            value += counts[i] * (np.log(np.float64(total(inner)) + 1e-300) + scales[u])
    restore(mode)
    return value


@jit
def topic_terms(excess, first, last, topics, scale, prior, log_sums):
    """Σ over the λ of words first..last of log Γ(λ) − (λ − prior)(ψ(λ) − log_sums), in float64.

    Both functions by Stirling's series at x = λ + 6, and stepped down: ψ by the six fractions, log Γ by the
    logarithm of their common denominator. Good to 1e-12 of each term's largest part.
    """
    value = 0.0
    for word in range(first, last):
        for k in range(topics):
            part = scale * excess[word, k]
            y = part + prior
            a, b, c = y * (y + 5.0), (y + 1.0) * (y + 4.0), (y + 2.0) * (y + 3.0)
            x = y + 6.0
            log_x, w = np.log(x), 1.0 / (x * x)
            series = w * (1 / 12 - w * (1 / 120 - w * (1 / 252 - w * (1 / 240 - w / 132))))
            fractions = (2.0 * y + 5.0) * (1.0 / a + 1.0 / b + 1.0 / c)
            digamma = log_x - 0.5 / x - series - fractions
            stirling = (1 / 12 - w * (1 / 360 - w * (1 / 1260 - w * (1 / 1680 - w / 1188)))) / x
            log_gamma = (x - 0.5) * log_x - x + 0.9189385332046727 + stirling - np.log(a * b * c)
            value += log_gamma - part * (digamma - log_sums[k])
    return value
