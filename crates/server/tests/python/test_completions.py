"""Completions by the official client, as people and as evaluation harnesses use them."""

PROMPT = "The capital of France is"


def test_prompts_of_all_forms(server, client, model):
    ids = server.request("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    settings = dict(model=model, temperature=0, max_tokens=5)
    expected = client.completions.create(prompt=PROMPT, **settings).choices[0].text
    assert "Paris" in expected
    assert client.completions.create(prompt=ids, **settings).choices[0].text == expected
    both = client.completions.create(prompt=[PROMPT, "Once upon a time"], **settings)
    assert [choice.index for choice in both.choices] == [0, 1] and both.choices[0].text == expected
    lists = client.completions.create(prompt=[ids, ids], **settings)
    assert [choice.text for choice in lists.choices] == [expected, expected]


def test_a_stream_says_the_same(client, model):
    settings = dict(model=model, prompt=PROMPT, temperature=0, max_tokens=16, logprobs=2)
    whole = client.completions.create(**settings).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**settings, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens]
    assert tokens == whole.logprobs.tokens
    assert chunks[-1].finish_reason == whole.finish_reason


def score(client, model, context, continuation, max_tokens):
    """What lm-eval's local-completions does: log-likelihood of a continuation, and whether it is the greedy one."""
    answer = client.completions.create(
        model=model, prompt=context + continuation, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0,
        seed=1234)
    lists = answer.choices[0].logprobs
    end = len(lists.tokens) - max_tokens
    values = lists.token_logprobs[len(context):end]
    tops = lists.top_logprobs[len(context):end]
    greedy = all(value == max(top.values()) for value, top in zip(values, tops))
    return sum(values), greedy, lists


def test_continuations_are_scored(server, client, model):
    def ids(text):
        return server.request("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]

    context = ids(PROMPT)
    for max_tokens in (0, 1):
        right, greedy, lists = score(client, model, context, ids(" Paris"), max_tokens)
        wrong, _, _ = score(client, model, context, ids(" Banana"), max_tokens)
        assert right > wrong and greedy
        assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
        assert len(lists.tokens) == len(lists.text_offset) == len(context) + 1 + max_tokens


def test_several_prompts_are_scored_at_once(client, model):
    prompts = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7, 8]]
    answer = client.completions.create(model=model, prompt=prompts, echo=True, logprobs=1, max_tokens=1)
    lists = [choice.logprobs.token_logprobs for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    assert [len(values) for values in lists] == [5, 4, 5]
    assert lists[0][1:4] == lists[2][1:4]


def test_the_prompt_is_echoed(client, model):
    answer = client.completions.create(model=model, prompt=PROMPT, echo=True, max_tokens=3, temperature=0)
    assert answer.choices[0].text.startswith(PROMPT) and len(answer.choices[0].text) > len(PROMPT)
