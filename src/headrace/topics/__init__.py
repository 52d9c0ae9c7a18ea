"""Topic models: latent Dirichlet allocation on compiled, lock-free kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import missing_extra

if TYPE_CHECKING:
    from headrace.topics.documents import open_documents
    from headrace.topics.lda import LatentDirichletAllocation

__all__ = ["LatentDirichletAllocation", "open_documents"]


def __getattr__(name: str) -> Any:
    # numba is imported on first use: it is an extra, and takes half a second.
    if name == "open_documents":
        from headrace.topics.documents import open_documents

        return open_documents
    if name == "LatentDirichletAllocation":
        try:
            import numba  # noqa: F401
        except ImportError:
            raise missing_extra("numba", "topics", "LatentDirichletAllocation") from None
        from headrace.topics.lda import LatentDirichletAllocation

        return LatentDirichletAllocation
    raise AttributeError(f"module 'headrace.topics' has no attribute {name!r}")
