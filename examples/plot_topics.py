"""Topics of a small collection: learn them, look at them, keep them.

The collection is made up from three themes, so that the result can be checked by eye. Writes ``topics.html`` into
the folder given (default: here).

    python examples/plot_topics.py [folder]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

import headrace
from headrace.report.page import Page, Series

THEMES = {
    "kitchen": "bread butter oven flour sugar salt pepper onion garlic knife plate soup",
    "harbour": "ship anchor sail rope tide mast crew captain wind wave deck port",
    "garden": "rose soil seed spade root leaf stem bloom hedge lawn bee compost",
}


def made_up_documents(count: int, seed: int = 0) -> list[str]:
    """Each about one or two themes, forty words long."""
    draws = np.random.RandomState(seed)
    words = [theme.split() for theme in THEMES.values()]
    documents = []
    for _ in range(count):
        shares = draws.dirichlet([0.2] * len(words))
        themes = draws.choice(len(words), size=40, p=shares)
        documents.append(" ".join(words[theme][draws.randint(len(words[theme]))] for theme in themes))
    return documents


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    vectorizer = CountVectorizer()
    counts = vectorizer.fit_transform(made_up_documents(2000))
    names = vectorizer.get_feature_names_out()

    model = headrace.LatentDirichletAllocation(
        3, learning_method="online", max_iter=8, held_out=0.1, random_state=0
    )
    topics = model.fit_transform(counts)
    for number, words in enumerate(model.top_words(names, 6)):
        print(f"topic {number}: {' '.join(words)}")

    with tempfile.TemporaryDirectory() as place:
        again = headrace.LatentDirichletAllocation.load(model.save(Path(place) / "model"))
        assert np.array_equal(again.transform(counts), topics)

    page = Page("Topics of made-up documents", "latent Dirichlet allocation, online variational Bayes")
    history = model.history_
    page.lines(
        "Perplexity of documents set aside",
        [Series("held out", [h["documents"] for h in history], [h["perplexity"] for h in history])],
        x_label="documents learned from",
        y_label="perplexity (36 words at random: 36)",
    )
    page.table(
        ["topic", "most probable words"], [[i, " ".join(w)] for i, w in enumerate(model.top_words(names, 8))]
    )
    page.save(folder / "topics.html")
    print(f"page: {folder / 'topics.html'}")


if __name__ == "__main__":
    main()
