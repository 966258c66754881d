#!/usr/bin/env python3
"""Makes the text fixtures of crates/model/tests from the Python libraries they must agree with.

    make_text_fixtures.py templates [FOLDER]   render every FOLDER/*.jinja (needs transformers, jinja2)
    make_text_fixtures.py tokenizers           train tiny tokenizers and record their ids (needs tokenizers)
    make_text_fixtures.py ids MODEL...         record MODEL.ids.json for GGUF files (needs llama-cpp-python)
                                               and for folders with a tokenizer.json (needs tokenizers)

`ids` takes real models and its output is not committed; `cargo test -p oscar-model text_real_models` reads it when
OSCAR_TEST_MODELS names the folder of the models.
"""

import argparse
import json
import pathlib
import random
import unicodedata

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "crates/model/tests/fixtures/text"

NASTY = [
    "", " ", "  ", "\n", "\n\n\n", "\t", " \n \n", "\r\n\r\n", "a", " a", "  a", "a  ",
    "Hello, world!", "don't DON'T we'Ll I'D", "1234567890 12 123 1234", "3.14159e-10 1,000,000",
    "x=1;y=2//z", "    def f(x):\n        return x**2\n\n\n\tpass",
    "<|im_start|>user\nhi<|im_end|>", "<s>[INST] x [/INST]", "<|endoftext|><|eot_id|>",
    "<tool_call>{}</tool_call>", "a<tool_call>b <|im_end|> c", "<unk> <pad>", "<0x0A><0x41>",
    "▁under▁score▁", "Ġfoo Ċ", "中文字符測試，日本語テスト、한국어 테스트", "😀😃👨‍👩‍👧‍👦🏳️‍🌈🇩🇪",
    "naïve café résumé Ångström ﬁ ﬂ", "e\u0301 decomposed A\u030a",
    "Привет, как дела? Ελληνικά العربية עברית हिन्दी ไทย", "\u200b\u200d\ufeff\u00a0\u3000x", "a\u00ad b",
    "½ ² Ⅷ ٣ ৪ 一二三 ①②", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𓀀 \U000e0041", "…—–‘’“”«»", "!!!???...;;;:::",
    "https://a.b/c?d=e&f=g#h", "\\n\\t\\u0041", "\x00\x01\x7f", "A" * 50, " " * 50, "\n" * 40, "ab " * 20,
    "'S 'RE İ ı ſ's", "\u0085\u2028\u2029x", "a\u000b\u000cb", "\U0010ffff\ue000",
]

# --- chat templates -------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place, in °C & \"words\"",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "City <name>"},
                "days": {"type": "integer", "default": 3, "enum": [1, 3, 7]},
                "scale": {"type": "number", "default": 1.0},
            },
            "required": ["place"],
        },
    },
}
NOTE = {"type": "function", "function": {"name": "take_note", "description": "", "parameters": {"type": "object", "properties": {}}}}


def call(name, arguments, identifier="call_1"):
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


CASES = [
    {"name": "user", "messages": [{"role": "user", "content": "Hi"}]},
    {"name": "user_without_prompt", "messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    {"name": "system_user", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
    {"name": "turns", "messages": [
        {"role": "system", "content": "You count."}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"}, {"role": "user", "content": " three \n"},
        {"role": "assistant", "content": "\n four"}, {"role": "user", "content": "five"}]},
    {"name": "unicode", "messages": [
        {"role": "system", "content": "Ⓢ <b>&amp;</b> \"quoted\" 'single'"},
        {"role": "user", "content": "naïve 中文 😀\u200d \t tab \\n <|im_end|> {{ not_jinja }} {% raw %}"}]},
    {"name": "empty", "messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""}]},
    {"name": "no_messages", "messages": []},
    {"name": "thinking", "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nadd them\n</think>\n\n4"},
        {"role": "user", "content": "and 3+3?"},
        {"role": "assistant", "reasoning_content": "again", "content": "6"},
        {"role": "user", "content": "thanks"}]},
    {"name": "thinking_off", "messages": [{"role": "user", "content": "2+2?"}], "extra": {"enable_thinking": False}},
    {"name": "tools", "messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER, NOTE]},
    {"name": "tools_system", "messages": [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "Weather?"}], "tools": [WEATHER]},
    {"name": "tool_calls", "tools": [WEATHER, NOTE], "messages": [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"place": "Zürich", "days": 3, "exact": True, "scale": 0.5, "note": None, "list": [1, "b"]})]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "{\"celsius\": 21.5}"},
        {"role": "assistant", "content": "21.5 °C."}, {"role": "user", "content": "And in Rome and Oslo?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": [call("get_weather", {"place": "Rome"}), call("get_weather", {"place": "Oslo"}, "call_2")]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "warm"},
        {"role": "tool", "tool_call_id": "call_2", "name": "get_weather", "content": "cold"}]},
    # One call, with an identifier of nine characters, which is what Mistral's templates take.
    {"name": "one_call", "tools": [WEATHER], "messages": [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "reasoning_content": "I must look.", "content": "", "tool_calls": [call("get_weather", {"place": "Rome"}, "a1B2c3D4e")]},
        {"role": "tool", "tool_call_id": "a1B2c3D4e", "name": "get_weather", "content": "warm"}]},
    {"name": "tools_of_the_system_message", "messages": [
        {"role": "system", "content": "Use tools.", "tools": json.dumps([WEATHER["function"]])}, {"role": "user", "content": "Weather?"}]},
    {"name": "thinking_on", "messages": [{"role": "user", "content": "2+2?"}], "extra": {"thinking": True, "enable_thinking": True}},
    {"name": "parts", "messages": [{"role": "user", "content": [{"type": "text", "text": "part one "}, {"type": "text", "text": "part two"}]}]},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = 1721997296  # 2024-07-26 12:34:56 UTC


def templates(folder):
    import datetime

    from transformers.utils import chat_template_utils

    class Clock:
        @staticmethod
        def now():
            return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)

    chat_template_utils.datetime = Clock
    expected = {}
    for path in sorted(folder.glob("*.jinja")):
        compiled = chat_template_utils._compile_jinja_template(path.read_text(encoding="utf-8"))
        results = {}
        for case in CASES:
            variables = {
                "messages": case["messages"], "tools": case.get("tools"), "documents": None,
                "add_generation_prompt": case.get("add_generation_prompt", True), **TOKENS, **case.get("extra", {}),
            }
            try:
                results[case["name"]] = {"text": compiled.render(**variables)}
            except Exception as error:
                refused = type(error).__name__ == "TemplateError"
                results[case["name"]] = {"refused": str(error)} if refused else {"failed": f"{type(error).__name__}: {error}"}
        expected[path.stem] = results
    return {"now": NOW, **TOKENS, "cases": CASES, "expected": expected}


# --- tiny tokenizers ------------------------------------------------------------------------------------------

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool_call>", "</tool_call>"]


def corpus():
    words = "the of and to in is it for that with we're don't it's cache page token model 2024 1999 100 in't naïve 中文 日本".split()
    rng = random.Random(3)
    lines = [" ".join(rng.choice(words) for _ in range(12)) + rng.choice([".", "!\n", "\n\n", " 123456", "  x"]) for _ in range(300)]
    return lines + [text for text in NASTY if "<" not in text] * 2 + ["<|im_start|> is not a word", "    def f(x):\n        return x"] * 20


def record(tokenizer, texts):
    cases = []
    for text in texts:
        for parse_special in (False, True):
            tokenizer.encode_special_tokens = not parse_special
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append({"text": text, "parse_special": parse_special, "ids": ids})
    tokenizer.encode_special_tokens = False
    for case in cases:
        case["decoded"] = tokenizer.decode(case["ids"], skip_special_tokens=True)
    return cases


def byte_level(pre):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    split = lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    only_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = {
        "gpt-2": [words],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), words],
        "qwen2": [split(QWEN2), only_bytes],
        "llama-bpe": [split(LLAMA3), only_bytes],
        "default": [split(r"[\p{P}\$\+<=>\^~\|]+"), split(GPT2), split(r"\p{N}+"), split("[0-9][0-9][0-9]"), only_bytes],
    }[pre]

    def build(model):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    trained = build(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    vocabulary = dict(state["vocab"])
    if pre == "llama-bpe":
        # A word no chain of merges reaches: found whole, or not at all.
        vocabulary["Ġunreachable"] = len(vocabulary)
    ordinary = len(vocabulary)
    # As in published files, the model's vocabulary ends where added tokens begin.
    tokenizer = build(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in USER_DEFINED])
    tokens = [None] * tokenizer.get_vocab_size()
    for token, index in tokenizer.get_vocab().items():
        tokens[index] = token
    texts = NASTY + [" unreachable word unreachable"]
    return tokenizer, {
        "model": "gpt2", "pre": pre, "tokens": tokens, "scores": [], "merges": [f"{a} {b}" for a, b in merges],
        "token_types": [1] * ordinary + [3] * len(CONTROL) + [4] * len(USER_DEFINED),
        "bos": ordinary, "eos": ordinary + 2, "unk": None, "add_space_prefix": None,
    }, record(tokenizer, texts)


def sentence_piece(prefix):
    """Scores-driven BPE. The oracle is the same vocabulary with every possible split as a merge rule, ranked by
    score, which is how SentencePiece models are converted."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=400, limit_alphabet=90, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    joined = ["".join(merge) for merge in state["merges"]]
    characters = [token for token in state["vocab"] if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + joined + characters
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(joined) + len(characters))
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(joined) + len(characters))]
    if not prefix:
        tokens += ["\n\n\n\n\n", "  "]
        kinds += [4, 4]
        scores += [-1000.0, -1000.0]
    ids = {token: index for index, token in enumerate(tokens)}
    assert len(ids) == len(tokens)
    ordinary = {token for token, kind in zip(tokens, kinds) if kind == 1}
    merges = []
    for token in joined:
        splits = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ordinary and token[at:] in ordinary]
        merges += sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in tokens[:3]])
    if not prefix:
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in tokens[-2:]])
    return tokenizer, {
        "model": "llama", "pre": None, "tokens": tokens, "scores": scores, "merges": [], "token_types": kinds,
        "bos": 1, "eos": 2, "unk": 0, "add_space_prefix": prefix,
    }, record(tokenizer, NASTY + ["the cache is in the model", "<s>the<s> the"])


def tokenizers_():
    folder = FIXTURES / "tokenizers"
    folder.mkdir(parents=True, exist_ok=True)
    made = {pre: byte_level(pre) for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe", "default")}
    made["spm-prefix"] = sentence_piece(True)
    made["spm-plain"] = sentence_piece(False)
    for name, (tokenizer, vocabulary, cases) in made.items():
        state = json.loads(tokenizer.to_str())
        write(folder / f"{name}.tokenizer.json", state)
        write(folder / f"{name}.vocabulary.json", {"vocabulary": vocabulary, "cases": cases})


# --- real models ----------------------------------------------------------------------------------------------


def varied_texts():
    rng = random.Random(7)
    texts = list(NASTY)
    for pattern in ("crates/*/src/**/*.rs", "**/*.md", "tools/*.py"):
        for path in sorted(ROOT.glob(pattern))[:60]:
            texts.append(path.read_text(encoding="utf-8"))
    ranges = [(0x20, 0x7E)] * 4 + [
        (0, 0x2FF), (0x370, 0x5FF), (0x900, 0x9FF), (0xE00, 0xE7F), (0x1E00, 0x206F), (0x2070, 0x2BFF), (0x3000, 0x30FF),
        (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFFFF), (0x1F300, 0x1FAFF), (0x10000, 0x1FFFF)]
    for _ in range(400):
        text = ""
        for _ in range(rng.randint(1, 40)):
            low, high = rng.choice(ranges)
            points = [rng.randint(low, high) for _ in range(rng.randint(1, 6))]
            text += "".join(map(chr, points)) + rng.choice(["", " ", "  ", "\n", "\t", "\r\n", " \n ", "1", "42", "'s", "'LL", "!?"])
        # Character tables of different Unicode versions disagree on what is not assigned yet.
        texts.append("".join(c for c in text if unicodedata.category(c) not in ("Cn", "Cs")))
    return texts


def ids(model):
    texts = varied_texts()
    if model.is_dir():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return [{key: case[key] for key in ("text", "parse_special", "ids")} for case in record(tokenizer, texts)]
    from llama_cpp import Llama

    llama = Llama(str(model), vocab_only=True, verbose=False)
    # llama.cpp leaves out the normalisation that Qwen's own tokenizer does first.
    nfc = llama.metadata.get("tokenizer.ggml.pre") == "qwen2"
    cases = []
    for text in texts:
        # llama.cpp takes an ordinary token written `</s>` for the end of text, which the models' own tokenizers do not.
        if "</s>" in text:
            continue
        # Newer marks sort differently in the tables of different Unicode versions.
        if nfc and any(unicodedata.combining(c) and not "\u0300" <= c <= "\u036f" for c in text):
            continue
        for parse_special in (False, True):
            given = unicodedata.normalize("NFC", text) if nfc else text
            found = llama.tokenize(given.encode(), add_bos=False, special=parse_special)
            cases.append({"text": text, "parse_special": parse_special, "ids": found})
    return cases


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("templates").add_argument("folder", nargs="?", type=pathlib.Path, default=FIXTURES / "templates")
    commands.add_parser("tokenizers")
    commands.add_parser("ids").add_argument("models", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "templates":
        write(arguments.folder / "expected.json", templates(arguments.folder))
    elif arguments.command == "tokenizers":
        tokenizers_()
    else:
        for model in arguments.models:
            write(model.with_name(model.name + ".ids.json"), ids(model))


if __name__ == "__main__":
    main()
