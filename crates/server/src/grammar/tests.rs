//! Constrained answers: whatever is drawn has the shape that was asked for, and bad requests are refused.

use oscar_engine::TokenFilter;
use oscar_random::Random;
use serde_json::{Value, json};

use super::testing::{allowed, draw, feed, may_end, tokenizer, tools, wrong};
use super::{Constraint, ForcedCalls, GrammarError, GrammarFactory, StructuralTag, TagStructure};
use crate::parse::{Tool, ToolCallFormat};

fn factory() -> (oscar_model::text::Tokenizer, GrammarFactory) {
    let tokenizer = tokenizer("qwen2");
    let factory = GrammarFactory::new(&tokenizer).unwrap();
    (tokenizer, factory)
}

fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object", "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3, null]}, "minItems": 1, "maxItems": 3},
        }, "required": ["name", "age", "tags"], "additionalProperties": false}),
        json!({"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 4}),
        json!({"anyOf": [{"type": "number"}, {"const": {"x": [1, "é"]}}]}),
        json!({"enum": ["日本", "naïve", "😀", 7]}),
        json!({"$ref": "#/$defs/Tree", "$defs": {"Tree": {"type": "object", "properties": {
            "value": {"type": "integer", "minimum": -9, "maximum": 9},
            "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2},
        }, "required": ["value", "children"], "additionalProperties": false}}}),
        json!({"type": "object", "additionalProperties": {"type": "integer"}}),
        json!({"oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]},
            {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]},
        ]}),
        json!({"oneOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "integer", "minimum": 3, "maximum": 9}]}),
        json!({"type": "string", "maxLength": 6}),
        json!(true),
    ]
}

/// `None` for JSON with a number that is too large for the parser, as random ones now and then are.
fn parse(text: &str) -> Option<Value> {
    match serde_json::from_str(text) {
        Ok(value) => Some(value),
        Err(error) if error.to_string().contains("number out of range") => None,
        Err(error) => panic!("{error}: {text:?}"),
    }
}

#[test]
fn random_answers_satisfy_their_schema() {
    for name in ["qwen2", "smollm", "llama-bpe", "spm-plain", "spm-prefix"] {
        let tokenizer = tokenizer(name);
        let factory = GrammarFactory::new(&tokenizer).unwrap();
        let mut random = Random::new(7);
        for schema in schemas() {
            let prototype = factory.json_schema(&schema).unwrap();
            for _ in 0..12 {
                let mut filter = prototype.fork();
                let text = draw(&mut *filter, &tokenizer, &mut random, 30, "");
                let Some(value) = parse(&text) else { continue };
                assert_eq!(wrong(&value, &schema, &schema), None, "{name}: {text}");
            }
        }
        let objects = factory.json_object().unwrap();
        for _ in 0..10 {
            let text = draw(&mut *objects.fork(), &tokenizer, &mut random, 20, "");
            assert!(parse(&text).is_none_or(|value| value.is_object()), "{text}");
        }
    }
}

/// The checker of the other tests finds values that do not satisfy their schema.
#[test]
fn the_checker_finds_faults() {
    let schema = &schemas()[0];
    let good = json!({"name": "x", "age": 5, "tags": ["a"]});
    assert_eq!(wrong(&good, schema, schema), None);
    for (key, bad) in [
        ("name", json!("")),
        ("name", json!("123456789")),
        ("age", json!(131)),
        ("age", json!(1.5)),
        ("tags", json!([])),
        ("tags", json!(["c"])),
        ("more", json!(1)),
    ] {
        let mut value = good.clone();
        value[key] = bad;
        assert!(wrong(&value, schema, schema).is_some(), "{value}");
    }
    assert!(wrong(&json!({"name": "x"}), schema, schema).is_some());
}

#[test]
fn answers_end_exactly_where_they_may() {
    let (tokenizer, factory) = factory();
    let mut filter = factory.json_schema(&json!({"type": "integer"})).unwrap();
    assert!(!may_end(&mut *filter, &tokenizer));
    assert_eq!(feed(&mut *filter, &tokenizer, "-"), 1);
    assert!(!may_end(&mut *filter, &tokenizer));
    assert_eq!(feed(&mut *filter, &tokenizer, "12"), 2);
    assert!(may_end(&mut *filter, &tokenizer));
    assert_eq!(feed(&mut *filter, &tokenizer, "x"), 0);

    let mut filter = factory.json_schema(&json!({"const": {"a": 1}})).unwrap();
    assert_eq!(feed(&mut *filter, &tokenizer, "{\"a\": 1"), 7);
    assert!(!may_end(&mut *filter, &tokenizer));
    assert_eq!(feed(&mut *filter, &tokenizer, "}"), 1);
    // Nothing but the end is left, also after the end for those who ignore it.
    assert_eq!(allowed(&mut *filter, 500), tokenizer.end_ids());
    filter.accept(tokenizer.end_ids()[0]).unwrap();
    assert_eq!(allowed(&mut *filter, 500), tokenizer.end_ids());
}

#[test]
fn a_token_that_is_not_allowed_is_an_error() {
    let (tokenizer, factory) = factory();
    let mut filter = factory.regex("[0-9]{3}").unwrap();
    let letter = (0..).find(|&token| tokenizer.token_bytes(token).unwrap() == b"x").unwrap();
    assert!(filter.accept(letter).is_err());
    // It stays broken rather than allowing something.
    assert!(filter.allowed(&mut oscar_engine::TokenMask::all(500)).is_err());
}

#[test]
fn forks_go_their_own_way() {
    let (tokenizer, factory) = factory();
    let mut one = factory.regex("(ab|cd)+").unwrap();
    assert_eq!(feed(&mut *one, &tokenizer, "ab"), 2);
    let mut other = one.fork();
    assert_eq!(feed(&mut *one, &tokenizer, "c"), 1);
    assert_eq!(feed(&mut *other, &tokenizer, "a"), 1);
    assert_eq!(feed(&mut *one, &tokenizer, "b"), 0);
    assert_eq!(feed(&mut *one, &tokenizer, "d"), 1);
    assert_eq!(feed(&mut *other, &tokenizer, "b"), 1);
    assert!(may_end(&mut *one, &tokenizer) && may_end(&mut *other, &tokenizer));
    // A fork outlives the first.
    drop(one);
    assert_eq!(feed(&mut *other, &tokenizer, "cd"), 2);
}

/// Characters of several bytes, in pieces that are tokens of their own.
#[test]
fn characters_are_never_left_half() {
    let (tokenizer, factory) = factory();
    for (regex, text) in [("(é|日|😀)*", "é😀日é"), (r"\p{Greek}+", "αβγ"), ("[α-ω]{2}", "λω")]
    {
        let mut filter = factory.regex(regex).unwrap();
        for character in text.chars() {
            let mut bytes = [0; 4];
            let bytes = character.encode_utf8(&mut bytes).as_bytes();
            for (index, byte) in bytes.iter().enumerate() {
                let next = allowed(&mut *filter, tokenizer.vocab_size());
                if index > 0 {
                    assert!(!may_end(&mut *filter, &tokenizer), "inside {character}");
                }
                let is_byte = |token: &&u32| tokenizer.token_bytes(**token).unwrap() == [*byte];
                filter.accept(*next.iter().find(is_byte).expect("the byte is allowed")).unwrap();
            }
        }
        assert!(may_end(&mut *filter, &tokenizer));
    }
}

#[test]
fn regular_expressions_and_grammars() {
    let (tokenizer, factory) = factory();
    let mut random = Random::new(3);
    for _ in 0..20 {
        let text =
            draw(&mut *factory.regex("[0-9]{4}-[0-9]{2}/[a-f]+").unwrap(), &tokenizer, &mut random, 12, "");
        let (left, right) = text.split_once('/').unwrap();
        assert!(left.len() == 7 && left.as_bytes()[4] == b'-', "{text}");
        assert!(!right.is_empty() && right.bytes().all(|byte| (b'a'..=b'f').contains(&byte)), "{text}");
    }
    let lark = "start: item (\",\" item)*\nitem: NUMBER | \"(\" start \")\"\nNUMBER: /[0-9]+/";
    let mut filter = factory.lark(lark).unwrap();
    assert_eq!(feed(&mut *filter, &tokenizer, "1,(2,(34)),5)"), 12);
    assert!(may_end(&mut *filter, &tokenizer));

    let ebnf = "# sums\nroot ::= Term (\" + \" Term)*\nTerm ::= [0-9]+ | neg-term\nneg-term ::= \"-\" Term | \"[\\\"]/\"";
    let mut filter = factory.ebnf(ebnf).unwrap();
    assert_eq!(feed(&mut *filter, &tokenizer, "12 + --3 + [\"]/ +"), 17);
    assert!(!may_end(&mut *filter, &tokenizer));
    assert_eq!(feed(&mut *filter, &tokenizer, " 4x"), 2);
    assert!(may_end(&mut *filter, &tokenizer));

    let choices = ["yes".to_owned(), "yes, \"but\"\n".to_owned(), "nö".to_owned()];
    for _ in 0..10 {
        let mut filter = factory.filter(&Constraint::Choice(&choices), None).unwrap();
        let text = draw(&mut *filter, &tokenizer, &mut random, 20, "");
        assert!(choices.contains(&text), "{text}");
    }
}

#[test]
fn reasoning_comes_first_where_there_is_some() {
    let (tokenizer, factory) = factory();
    let schema = json!({"const": [1]});
    let make = || factory.filter(&Constraint::JsonSchema(&schema), Some("</think>")).unwrap();
    for (text, taken) in [
        ("Hm {\"a\": <think> é\n</thin </think>\n\n[1]", 40),
        ("</think>[1]", 11),
        ("Hm</think>x", 10),
        ("Hm</think>\n\n\n[1]", 16),
    ] {
        let mut filter = make();
        assert_eq!(feed(&mut *filter, &tokenizer, text), taken, "{text}");
        assert_eq!(may_end(&mut *filter, &tokenizer), text.ends_with(']'), "{text}");
    }
    let mut filter = make();
    feed(&mut *filter, &tokenizer, "Hm");
    assert!(!may_end(&mut *filter, &tokenizer));
    let regex = factory.filter(&Constraint::Regex("a+"), Some("</think>"));
    assert_eq!(feed(&mut *regex.unwrap(), &tokenizer, "so</think>aab"), 12);
}

fn refused(result: Result<Box<dyn TokenFilter>, GrammarError>) -> GrammarError {
    match result {
        Ok(_) => panic!("it was taken"),
        Err(error) => error,
    }
}

#[test]
fn bad_schemas_are_refused_with_the_reason() {
    let (_, factory) = factory();
    let reason = |schema: Value| refused(factory.json_schema(&schema)).to_string();
    for (schema, part) in [
        (json!({"type": "text"}), "text"),
        (json!({"type": 5}), "type"),
        (json!({"properties": []}), "properties"),
        (json!({"$ref": "#/$defs/Missing"}), "Missing"),
        (json!({"$ref": "https://example.com/schema.json"}), "example.com"),
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"not": {"type": "string"}}), "not"),
        (json!({"type": "string", "pattern": "(["}), "(["),
        (json!({"type": "string", "format": "no-such"}), "no-such"),
        (json!({"enum": []}), "Unsatisfiable"),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}),
            "no answer can satisfy it",
        ),
        (json!({"type": "integer", "minimum": 5, "maximum": 4}), "minimum"),
        (json!(false), ""),
        (json!([]), ""),
        (json!("x"), ""),
    ] {
        let text = reason(schema.clone());
        assert!(text.starts_with("the JSON schema cannot be used: "), "{text}");
        assert!(text.contains(part), "{schema}: {text}");
        assert!(text.len() < 600 && !text.contains("<non-verbose/>"), "{text}");
    }
}

#[test]
fn sizes_are_bounded() {
    let (tokenizer, factory) = factory();
    let mut deep = json!({"type": "integer"});
    for _ in 0..70 {
        deep = json!({"type": "array", "items": deep});
    }
    let error = refused(factory.json_schema(&deep));
    assert_eq!(error, GrammarError::TooDeep { what: "the JSON schema", limit: 64 });
    let words: Vec<String> = (0..60_000).map(|index| format!("word {index}")).collect();
    let error = refused(factory.json_schema(&json!({"enum": words})));
    assert!(matches!(error, GrammarError::TooLarge { limit: 262_144, .. }), "{error}");
    let properties = |count: usize| {
        let names = (0..count).map(|index| (format!("p{index}"), json!({"type": "null"})));
        json!({"type": "object", "properties": names.collect::<serde_json::Map<_, _>>()})
    };
    assert!(refused(factory.json_schema(&properties(501))).to_string().contains("500 properties"));
    let five = json!({"anyOf": (0..5).map(|_| properties(450)).collect::<Vec<_>>()});
    assert!(refused(factory.json_schema(&five)).to_string().contains("2000"));
    for multiple in [json!(99_991), json!(1.0625), json!(1e300)] {
        let error = refused(factory.json_schema(&json!({"type": "number", "multipleOf": multiple})));
        assert!(error.to_string().contains("multipleOf"), "{error}");
    }
    let mut filter = factory.json_schema(&json!({"type": "number", "multipleOf": 0.25})).unwrap();
    assert_eq!(feed(&mut *filter, &tokenizer, "1.75"), 4);
    assert!(may_end(&mut *filter, &tokenizer));
    let error = refused(factory.regex(&"a".repeat(20_000)));
    assert_eq!(error.to_string(), "the regular expression has 20000 bytes, at most 16384 are allowed");
    let error = refused(factory.lark(&format!("start: {}\"a\"{}", "(".repeat(100), ")".repeat(100))));
    assert_eq!(error, GrammarError::TooDeep { what: "the grammar", limit: 64 });

    // Large, and fine.
    let words: Vec<String> = (0..5_000).map(|index| format!("word {index}")).collect();
    let mut filter = factory.json_schema(&json!({"enum": words})).unwrap();
    assert_eq!(feed(&mut *filter, &tokenizer, "\"word 4999\""), 11);
    assert!(may_end(&mut *filter, &tokenizer));
    // Long chains do not exhaust the stack.
    let chain: serde_json::Map<String, Value> = (0..3_000)
        .map(|index| (format!("d{index}"), json!({"$ref": format!("#/$defs/d{}", index + 1)})))
        .chain([("d3000".to_owned(), json!({"type": "null"}))])
        .collect();
    let mut filter = factory.json_schema(&json!({"$ref": "#/$defs/d0", "$defs": chain})).unwrap();
    assert_eq!(feed(&mut *filter, &tokenizer, "null"), 4);
    let rules: String = (0..2_000).map(|index| format!("r{index}: r{}\n", index + 1)).collect();
    let mut filter = factory.lark(&format!("start: r0\n{rules}r2000: \"a\"")).unwrap();
    assert_eq!(feed(&mut *filter, &tokenizer, "a"), 1);
    // A schema that only refers to itself.
    let error = factory.json_schema(&json!({"$ref": "#"}));
    assert!(error.is_err() || !may_end(&mut *error.unwrap(), &tokenizer));
}

#[test]
fn hostile_expressions_end_in_an_error_or_work() {
    let (tokenizer, factory) = factory();
    for regex in
        ["([", "(?<=a)b", "a{1000}{1000}{1000}", "*", "(?P<x", "\\", "a/b/\\/", "(a|b|ab)*c{0,500}d{0,500}"]
    {
        match factory.regex(regex) {
            Err(error) => {
                assert!(error.to_string().starts_with("the regular expression cannot be used: "), "{error}")
            }
            Ok(mut filter) => {
                feed(&mut *filter, &tokenizer, "ababababcccc");
            }
        }
    }
    for grammar in [
        "",
        "start:",
        "x: \"a\"",
        "start: nowhere",
        "start: start",
        "%",
        "start: /[/",
        "start: @other",
        "{}",
        "start: \"a\" |",
        "start: %json {",
    ] {
        if let Err(error) = factory.lark(grammar) {
            assert!(error.to_string().starts_with("the grammar cannot be used: "), "{error}");
        }
    }
    for grammar in
        ["", "x ::= \"a\"", "root ::= \"a", "root ::= [a", "root ::= a", "root ::= $", "root ::= a{"]
    {
        let error = refused(factory.ebnf(grammar)).to_string();
        assert!(error.starts_with("the grammar cannot be used: "), "{error}");
    }
}

/// A grammar may be too much only once an answer is under way; the answer then fails rather than going on unchecked.
#[test]
fn a_grammar_that_grows_too_large_fails_its_answer() {
    let (tokenizer, factory) = factory();
    let letter = (0..).find(|&token| tokenizer.token_bytes(token).unwrap() == b"a").unwrap();
    let mut filter = factory.regex("(a{0,300}){0,300}").unwrap();
    let mut mask = oscar_engine::TokenMask::all(tokenizer.vocab_size());
    let failed = (0..2000).find_map(|_| filter.allowed(&mut mask).and_then(|()| filter.accept(letter)).err());
    let error = failed.expect("it runs out of something").to_string();
    assert!(error.contains("too") && !error.contains('\n'), "{error}");
    assert!(filter.allowed(&mut mask).is_err());
}

#[test]
fn vocabularies_are_checked() {
    fn shared<T: Send + Sync>() {}
    shared::<GrammarFactory>();
    let tokens: [Option<&[u8]>; 3] = [Some(b"a"), Some(b"\xff"), None];
    let reason = |end: &[u32]| match GrammarFactory::from_tokens(&tokens, end) {
        Ok(_) => panic!("it was taken"),
        Err(error) => error.to_string(),
    };
    assert!(reason(&[]).contains("no token that ends an answer"));
    assert!(reason(&[3]).contains("token 3"));
    let factory = GrammarFactory::from_tokens(&tokens, &[2]).unwrap();
    let mut filter = factory.regex("(?s:.)*").unwrap();
    assert_eq!(allowed(&mut *filter, 3), [0, 2]);
    // What ends an answer is not text, even if it looks like it.
    let tokens: [Option<&[u8]>; 3] = [Some(b"a"), Some(b"</s>"), Some(b"b")];
    let mut filter = GrammarFactory::from_tokens(&tokens, &[1]).unwrap().regex("(a|</s>)b").unwrap();
    assert_eq!(allowed(&mut *filter, 3), [0]);
}

#[test]
fn forced_calls_that_cannot_be() {
    let (_, factory) = factory();
    let mut tools = tools();
    let format = ToolCallFormat::choose("hermes", None).unwrap().unwrap();
    let make = |tools: &[Tool], name| {
        let forced = ForcedCalls { format, tools, name, parallel: true };
        refused(factory.filter(&Constraint::Calls(forced), None)).to_string()
    };
    assert_eq!(make(&tools, Some("later")), "tool_choice names `later`, which is not among the tools");
    assert_eq!(make(&[], None), "tool_choice demands a call, and there are no tools");
    let large = json!({"enum": (0..3_000).map(|index| format!("value {index}")).collect::<Vec<_>>()});
    let many: Vec<Tool> = (0..10)
        .map(|index| Tool { name: format!("t{index}"), parameters: large.clone(), strict: true })
        .collect();
    assert!(make(&many, None).starts_with("the set of tools has "));
    tools[2].strict = true;
    let reason = make(&tools, None);
    assert!(
        reason.starts_with("the schema of tool `odd` cannot be used: ") && reason.contains("not"),
        "{reason}"
    );
    // The grammar in which the schema is a part is ours, and no business of the client.
    assert!(!reason.contains(['\n', '%']) && !reason.contains("at "), "{reason}");
}

/// How much of a text a constraint takes, and whether the answer may end there.
fn takes(constraint: &Constraint<'_>, text: &str) -> (usize, bool) {
    let (tokenizer, factory) = factory();
    let mut filter = factory.filter(constraint, None).unwrap();
    let taken = feed(&mut *filter, &tokenizer, text);
    (taken, may_end(&mut *filter, &tokenizer))
}

#[test]
fn exclusive_bounds_within_one_integer_hold() {
    for (schema, good, bad) in [
        (json!({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}), vec!["0.25", "0.5"], vec!["0"]),
        (
            json!({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}),
            vec!["1.2"],
            vec!["1", "1.5"],
        ),
        (json!({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}), vec!["-0.25"], vec!["0", "-0"]),
        (json!({"type": "number", "minimum": -2.5, "exclusiveMaximum": -2}), vec!["-2.25"], vec!["-2"]),
        (
            json!({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}),
            vec!["1"],
            vec!["0", "2", "1.5"],
        ),
        (json!({"type": "number", "minimum": 0, "maximum": 0.5}), vec!["0", "0.5"], vec!["0.6"]),
        (
            json!({"type": "number", "minimum": 0, "exclusiveMinimum": true, "maximum": 0.5}),
            vec!["0.25", "0.5"],
            vec!["0"],
        ),
        (
            json!({"$ref": "#/$defs/p", "maximum": 0.5, "$defs": {"p": {"type": "number", "exclusiveMinimum": 0}}}),
            vec!["0.25", "0.5"],
            vec!["0"],
        ),
        (
            json!({"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"maximum": 0.25}]}),
            vec!["0.25", "0.5"],
            vec!["0"],
        ),
        (
            json!({"type": "number", "exclusiveMinimum": 10_000_000, "maximum": 10_000_000.5}),
            vec!["10000000.25", "10000000.5"],
            vec!["10000000"],
        ),
    ] {
        for text in good {
            assert_eq!(takes(&Constraint::JsonSchema(&schema), text), (text.len(), true), "{schema} {text}");
        }
        for text in bad {
            let (taken, ends) = takes(&Constraint::JsonSchema(&schema), text);
            assert!(taken < text.len() || !ends, "{schema} {text}");
        }
    }
}

/// A tool that needs an argument which it does not describe keeps its name and the rest of its arguments.
#[test]
fn forced_calls_have_the_arguments_that_their_tools_need() {
    let (tokenizer, factory) = factory();
    let parameters =
        json!({"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place", "days"]});
    let tools =
        [Tool { name: "weather".to_owned(), parameters: crate::grammar::closed(&parameters), strict: true }];
    let format = ToolCallFormat::choose("hermes", None).unwrap().unwrap();
    let forced = ForcedCalls { format, tools: &tools, name: None, parallel: false };
    let begin = "<tool_call>\n{\"name\": \"weather\", \"arguments\": ";
    for (arguments, good) in [
        (r#"{"place": "Rome", "days": 2}}"#, true),
        (r#"{"ARGUMENT": "#, false),
        (r#"{"place": "Rome"}"#, false),
    ] {
        let mut filter = factory.filter(&Constraint::Calls(forced), None).unwrap();
        let text = [begin, arguments].concat();
        assert_eq!(feed(&mut *filter, &tokenizer, &text) == text.len(), good, "{text}");
    }
}

/// Closing an object must leave it something that satisfies it.
#[test]
fn closed_schemas_are_satisfied_by_what_satisfied_them() {
    let a = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let b = json!({"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["a", "b"]});
    for (schema, text) in [
        (b.clone(), r#"{"b": 1, "a": 2}"#),
        (
            json!({"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": a, "B": b}}),
            r#"{"b": 1, "a": 2}"#,
        ),
        (
            json!({"type": "object", "properties": {"base": a,
                "both": {"allOf": [{"$ref": "#/properties/base"}, {"properties": {"c": {"type": "integer"}}, "required": ["c"]}]}}}),
            r#"{"both": {"a": 1, "c": 2}}"#,
        ),
    ] {
        let schema = crate::grammar::closed(&schema);
        assert_eq!(takes(&Constraint::JsonSchema(&schema), text), (text.len(), true), "{schema}");
    }
}

#[test]
fn a_choice_is_one_of_its_texts() {
    let texts = ["yes".to_owned(), "no \"way\"\n".to_owned()];
    for text in &texts {
        assert_eq!(takes(&Constraint::Choice(&texts), text), (text.len(), true));
    }
    assert!(!takes(&Constraint::Choice(&texts), "ye").1);
    assert_eq!(takes(&Constraint::Choice(&texts), "maybe").0, 0);
}

#[test]
fn structural_tags_constrain_what_follows_a_trigger() {
    let structure = |name: &str, schema: Value| TagStructure {
        begin: format!("<f={name}>"),
        schema,
        end: "</f>".to_owned(),
    };
    let tag = StructuralTag {
        triggers: vec!["<f=".to_owned()],
        structures: vec![structure("a", json!({"type": "integer"})), structure("b", json!({"enum": ["x"]}))],
    };
    let constraint = Constraint::StructuralTag(&tag);
    for good in ["", "free text", "a < b", "look: <f=a>12</f> and <f=b>\"x\"</f>.", "<f=b>\"x\"</f>"] {
        assert_eq!(takes(&constraint, good), (good.len(), true), "{good}");
    }
    for (bad, taken) in [("<f=c>", 3), ("so <f=a>x", 8), ("<f=b>\"y", 6), ("<f=a>1</g", 8)] {
        assert_eq!(takes(&constraint, bad).0, taken, "{bad}");
    }
    assert!(!takes(&constraint, "<f=a>1").1);
}

#[test]
fn grammars_of_llama_cpp_are_understood() {
    let grammar = r#"
# A list of moves.
root   ::= move (", " move){0,2} [^\n]? "\x2e"
move   ::= piece? [a-h] [1-8]   # no captures
piece  ::= ("N" | "B" | "\u0051")
"#;
    for good in ["e4.", "Ne4, Qa1.", "e4, e5, Bc4!."] {
        assert_eq!(takes(&Constraint::Ebnf(grammar), good), (good.len(), true), "{good}");
    }
    for (bad, taken) in [("i4", 0), ("e9", 1), ("e4\n", 2)] {
        assert_eq!(takes(&Constraint::Ebnf(grammar), bad).0, taken, "{bad}");
    }
}
