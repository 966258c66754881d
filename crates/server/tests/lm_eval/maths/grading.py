"""Whether an answer has the value that a problem of MATH-500 asks for."""

from math_verify import parse, verify


def process_results(document, responses):
    gold = parse(f"${document['answer']}$", parsing_timeout=None)
    said = parse(responses[0], parsing_timeout=None)
    return {"exact_match": int(verify(gold, said, timeout_seconds=None))}
