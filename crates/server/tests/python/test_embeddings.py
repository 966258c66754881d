"""Embeddings and scores with the official client and raw requests."""

import openai
import pytest


def similarity(a, b):
    return sum(x * y for x, y in zip(a, b))


def test_embeddings_are_vectors_of_length_one(client, model):
    texts = ["A cat sat on the mat.", "A kitten is sitting on a rug.", "The stock market fell sharply today."]
    # The client asks for base64 unless it is told not to.
    answer = client.embeddings.create(model=model, input=texts, extra_body={"pooling": "mean"})
    vectors = [entry.embedding for entry in answer.data]
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert all(abs(similarity(vector, vector) - 1) < 1e-4 for vector in vectors)
    assert similarity(vectors[0], vectors[1]) > similarity(vectors[0], vectors[2])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    floats = client.embeddings.create(
        model=model, input=texts[0], encoding_format="float", extra_body={"pooling": "mean"})
    assert similarity(floats.data[0].embedding, vectors[0]) > 0.999


def test_embeddings_cannot_be_shortened(client, model):
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=model, input="a", dimensions=3)


def test_scores_rank_texts(server):
    body = {"text_1": "The capital of France is", "text_2": [" banana", " Paris", " Rome"]}
    _, answer = server.request("/v1/score", body)
    scores = [entry["score"] for entry in answer["data"]]
    assert scores[1] > scores[2] > scores[0]
    assert all(entry["tokens"] >= 1 and entry["score"] <= 0 for entry in answer["data"])
