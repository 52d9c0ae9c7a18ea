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

Everything is float32; sums over a document's words are short, so the result differs from float64 by about
1e-5 of γ. Each function's arrays are its caller's; nothing here allocates in proportion to the documents.
"""

from __future__ import annotations

import numpy as np

from headrace.topics.compiled import jit
from headrace.topics.vector import (
    add,
    digamma_base,
    digamma_power,
    distance,
    div,
    exp,
    fma,
    larger,
    largest,
    load,
    mul,
    splat,
    store,
    store_totals,
    total,
    transpose,
)

DROP = np.float32(1e-5)
REVIVE = np.float32(1e-3)
NOTHING = np.float32(1e-30)
"""A floor under every sum that is divided by: far below any share, above float32's denormals."""


@jit
def localise(indptr, indices, first, last, slot, words, locs):
    """Number the distinct words of documents first..last; returns how many there are.

    ``slot`` (V, all −1 before and after) maps word → local number, ``words`` the other way, and ``locs``
    holds the local number of every entry of the documents.
    """
    used = 0
    start = indptr[first]
    for i in range(start, indptr[last]):
        word = indices[i]
        if slot[word] < 0:
            slot[word] = used
            words[used] = word
            used += 1
        locs[i - start] = slot[word]
    for u in range(used):
        slot[words[u]] = -1
    return used


@jit
def fill_rows(excess, scale, prior, inverse, words, used, width, collapsed, eps, rows, floors, scales):
    """The rows of exp(E[log β]) of the given words, each divided by its largest element.

    λ = prior + scale × excess; ``inverse`` holds 1 / exp(ψ(Σ_v λ_vk)) (collapsed: 1 / Σ_v λ_vk), zero in the
    padding. The power of e is shifted by the row's smallest, so that no row underflows to zeros. ``scales``
    is the logarithm of what the row was divided by, and ``floors`` is eps in units of it: the constant that
    scikit-learn adds to every word's sum.
    """
    times, priors, minus = splat(np.float32(scale)), splat(np.float32(prior)), splat(np.float32(-1.0))
    for u in range(used):
        at, to = words[u] * width, u * width
        top = splat(np.float32(0.0))
        shift = np.float32(0.0)
        if collapsed:
            for k in range(0, width, 16):
                value = mul(fma(times, load(excess, at + k), priors), load(inverse, k))
                store(rows, to + k, value)
                top = larger(top, value)
        else:
            least = splat(np.float32(-3e38))
            for k in range(0, width, 16):
                value = fma(times, load(excess, at + k), priors)
                # In the padding excess is zero, so its power is that of the prior: the largest there is.
                least = larger(least, mul(minus, digamma_power(value)))
            shift = -largest(least)
            shifts = splat(shift)
            for k in range(0, width, 16):
                value = fma(times, load(excess, at + k), priors)
                power = exp(fma(minus, digamma_power(value), shifts))
                value = mul(mul(digamma_base(value), power), load(inverse, k))
                store(rows, to + k, value)
                top = larger(top, value)
        largest_value = largest(top) + NOTHING
        factor = splat(np.float32(1.0) / largest_value)
        for k in range(0, width, 16):
            store(rows, to + k, mul(load(rows, to + k), factor))
        scales[u] = np.log(largest_value) - shift
        floors[u] = np.float32(min(eps * np.exp(-np.float64(scales[u])), 1e30))


@jit
def _shares(block, offsets, e, live, floor, count, share, padded):
    """share_w = count_w / (floor_w + Σ_k e_k B_wk), for 32 words at a time."""
    for w in range(0, padded - 16, 32):
        a, b = load(floor, w), load(floor, w + 16)
        c, d = splat(np.float32(0.0)), splat(np.float32(0.0))
        for i in range(0, live, 2):
            at, then = offsets[i] + w, offsets[i + 1] + w
            first, second = splat(e[i]), splat(e[i + 1])
            a, b = fma(first, load(block, at), a), fma(first, load(block, at + 16), b)
            c, d = fma(second, load(block, then), c), fma(second, load(block, then + 16), d)
        store(share, w, div(load(count, w), add(a, c)))
        store(share, w + 16, div(load(count, w + 16), add(b, d)))
    if padded & 16:
        w = padded - 16
        a, c = load(floor, w), splat(np.float32(0.0))
        for i in range(0, live, 2):
            a = fma(splat(e[i]), load(block, offsets[i] + w), a)
            c = fma(splat(e[i + 1]), load(block, offsets[i + 1] + w), c)
        store(share, w, div(load(count, w), add(a, c)))


@jit
def _sums(block, offsets, live, share, padded, sums):
    """sums_k = Σ_w share_w B_wk, four topics at a time."""
    for i in range(0, live, 4):
        p, q, r, s = offsets[i], offsets[i + 1], offsets[i + 2], offsets[i + 3]
        a = b = c = d = splat(np.float32(0.0))
        for w in range(0, padded, 16):
            x = load(share, w)
            a, b = fma(x, load(block, p + w), a), fma(x, load(block, q + w), b)
            c, d = fma(x, load(block, r + w), c), fma(x, load(block, s + w), d)
        store_totals(sums, i, a, b, c, d)


@jit
def _powers(gamma, mask, e, live, collapsed):
    """e_k = exp(ψ(γ_k)) (collapsed: γ_k), zero in the padding."""
    minus = splat(np.float32(-1.0))
    for i in range(0, live, 16):
        g = load(gamma, i)
        if not collapsed:
            g = mul(digamma_base(g), exp(mul(minus, digamma_power(g))))
        store(e, i, mul(g, load(mask, i)))


@jit
def _select(topics, live, stride, alpha, full, offsets, gamma, prior, mask, sums):
    """Put the first ``live`` of ``topics`` into the working arrays, padded to a multiple of 16."""
    for i in range((live + 15) // 16 * 16):
        used = i < live
        k = topics[i] if used else 0
        offsets[i] = k * stride
        gamma[i] = full[k] if used else np.float32(1.0)
        prior[i] = alpha[k] if used else np.float32(1.0)
        mask[i] = np.float32(1.0) if used else np.float32(0.0)
        sums[i] = np.float32(0.0)


@jit
def _infer(
    block, stride, padded, k_topics, alpha, full, tol, max_iter, collapsed, ints, work, floor, count, share
):
    """Iterate one document to convergence. ``full`` is γ, in and out; returns (live topics, iterations).

    Afterwards ``ints[0]`` names the live topics, ``ints[1]`` their offsets, ``work[1]`` their e, ``share``
    the words' shares under that e.
    """
    topics, offsets = ints[0], ints[1]
    gamma, e, prior, mask, sums = work[0], work[1], work[2], work[3], work[4]
    for k in range(k_topics):
        topics[k] = k
    live, may_drop, rounds = k_topics, True, 0
    _select(topics, live, stride, alpha, full, offsets, gamma, prior, mask, sums)
    _powers(gamma, mask, e, live, collapsed)
    while rounds < max_iter:
        _shares(block, offsets, e, live, floor, count, share, padded)
        _sums(block, offsets, live, share, padded, sums)
        moved = splat(np.float32(0.0))
        for i in range(0, live, 16):
            words = mul(mul(load(e, i), load(sums, i)), load(mask, i))
            store(sums, i, words)
            new = add(load(prior, i), words)
            moved = add(moved, distance(new, load(gamma, i)))
            store(gamma, i, new)
        rounds += 1
        converged = total(moved) < tol * np.float32(k_topics)
        if may_drop and (rounds < 8 or rounds & 3 == 0):
            kept = 0
            for i in range(live):
                full[topics[i]] = gamma[i]
                if sums[i] >= DROP:
                    kept += 1
            if kept < live and kept > 0:
                # Dropped topics move behind the live ones, where the last check finds them.
                front, back = 0, live - 1
                while front <= back:
                    if sums[front] >= DROP:
                        front += 1
                    else:
                        topics[front], topics[back] = topics[back], topics[front]
                        sums[front], sums[back] = sums[back], sums[front]
                        back -= 1
                live = kept
                _select(topics, live, stride, alpha, full, offsets, gamma, prior, mask, sums)
        _powers(gamma, mask, e, live, collapsed)
        if not converged:
            continue
        if live == k_topics:
            break
        for i in range(live):
            full[topics[i]] = gamma[i]
        _shares(block, offsets, e, live, floor, count, share, padded)
        if not _revived(block, stride, topics, live, k_topics, full, collapsed, share, padded, ints[2], work):
            break
        live, may_drop = k_topics, False
        _select(topics, live, stride, alpha, full, offsets, gamma, prior, mask, sums)
        _powers(gamma, mask, e, live, collapsed)
    for i in range(live):
        full[topics[i]] = gamma[i]
    _shares(block, offsets, e, live, floor, count, share, padded)
    return live, rounds


@jit
def _revived(block, stride, topics, live, k_topics, full, collapsed, share, padded, offsets, work):
    """Whether a topic that was left out would take more than `REVIVE` words if it were let in."""
    out = k_topics - live
    gamma, e, mask, sums = work[5], work[6], work[7], work[8]
    for i in range((out + 15) // 16 * 16):
        k = topics[live + i] if i < out else 0
        offsets[i] = k * stride
        gamma[i] = full[k]
        mask[i] = np.float32(1.0) if i < out else np.float32(0.0)
    _powers(gamma, mask, e, out, collapsed)
    _sums(block, offsets, out, share, padded, sums)
    most = np.float32(0.0)
    for i in range(out):
        most = max(most, e[i] * sums[i])
    return most > REVIVE


@jit
def learn(
    indptr, counts, first, last, locs, rows, floors, width, alpha, start, tol, max_iter, collapsed,
    stats, gammas, want_stats, ints, work, block, lines,
):  # fmt: skip
    """Infer documents first..last from local ``rows``; fill ``gammas`` and add to ``stats``.

    ``start`` is γ at the start (1 for all, as scikit-learn's transform; a row of ``gammas`` when negative).
    Returns the iterations of all documents together.
    """
    k_topics = alpha.size
    prior_mass = np.float32(alpha.sum())
    where, floor, count, share = ints[3], lines[0], lines[1], lines[2]
    base, rounds = indptr[first], 0
    full = work[9]
    for doc in range(first, last):
        lo, n = indptr[doc] - base, indptr[doc + 1] - indptr[doc]
        if n == 0:
            for k in range(k_topics):
                gammas[doc - first, k] = alpha[k]
            continue
        padded = (n + 15) // 16 * 16
        mass = np.float32(0.0)
        for j in range(n):
            mass += counts[base + lo + j]
        for j in range(padded):
            inside = j < n
            where[j] = locs[lo + j] * width if inside else 0
            count[j] = counts[base + lo + j] if inside else np.float32(0.0)
            # e is not divided by exp(ψ(Σγ)), so the floor is multiplied by it.
            floor[j] = floors[locs[lo + j]] * (mass + prior_mass) + NOTHING if inside else np.float32(1.0)
        for w in range(0, padded, 16):
            for k in range(0, width, 16):
                transpose(rows, where, w, k, block, k * padded + w, padded)
        for k in range(k_topics):
            full[k] = start if start > 0 else gammas[doc - first, k]
        live, used = _infer(
            block, padded, padded, k_topics, alpha, full, tol, max_iter, collapsed, ints, work, floor, count,
            share
        )  # fmt: skip
        rounds += used
        for k in range(k_topics):
            gammas[doc - first, k] = full[k]
        if want_stats:
            topics, e = ints[0], work[1]
            for i in range(live):
                k, at, ek = topics[i], topics[i] * padded, e[i]
                for j in range(n):
                    stats[where[j] + k] += ek * share[j] * block[at + j]
    return rounds


@jit
def apply(excess, words, used, width, stats, factor, column):
    """excess[word] += factor × stats for the words used, without a lock; ``column`` gets the sums."""
    times = splat(np.float32(factor))
    column[:] = 0.0
    for u in range(used):
        at, to = words[u] * width, u * width
        for k in range(0, width, 16):
            store(excess, at + k, fma(times, load(stats, to + k), load(excess, at + k)))
        for k in range(width):
            column[k] += stats[to + k]


@jit
def word_likelihood(indptr, counts, first, last, locs, rows, scales, width, powers):
    """Σ over documents first..last of count × log(scale_w Σ_k powers_dk rows_wk), in float64.

    With ``powers`` = exp(E[log θ]) this is the words' part of the bound; with ``powers`` = E[θ] and rows of
    E[β] it is the log likelihood of the words. ``scales`` holds the logarithm of what each row was divided
    by.
    """
    base, value = indptr[first], 0.0
    for doc in range(first, last):
        for i in range(indptr[doc], indptr[doc + 1]):
            u = locs[i - base]
            inner = splat(np.float32(0.0))
            for k in range(0, width, 16):
                inner = fma(load(powers, (doc - first) * width + k), load(rows, u * width + k), inner)
            value += counts[i] * (np.log(np.float64(total(inner)) + 1e-300) + scales[u])
    return value
