//! Chat templates against text rendered by transformers' own Jinja environment, and against hostile templates.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use oscar_model::text::{ChatTemplate, RenderOptions, TextError};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Expected {
    now: u64,
    bos_token: String,
    eos_token: String,
    cases: Vec<Case>,
    expected: BTreeMap<String, BTreeMap<String, Outcome>>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: Option<bool>,
    extra: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Text(String),
    Refused(String),
    Failed(String),
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text/templates")
}

/// Renders every template of a folder; returns how many texts were compared and what differs.
fn compare(folder: &Path) -> (usize, Vec<String>) {
    let json = std::fs::read_to_string(folder.join("expected.json")).expect("expected.json");
    let expected: Expected = serde_json::from_str(&json).expect("the format of tools/make_text_fixtures.py");
    let mut compared = 0;
    let mut differences = Vec::new();
    for (name, outcomes) in &expected.expected {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect("template");
        let template = match ChatTemplate::from_source(&source) {
            Ok(template) => template,
            Err(error) => {
                differences.push(format!("{name}: does not compile: {error}"));
                continue;
            }
        };
        for case in &expected.cases {
            let options = RenderOptions {
                tools: case.tools.as_deref(),
                add_generation_prompt: case.add_generation_prompt.unwrap_or(true),
                bos_token: &expected.bos_token,
                eos_token: &expected.eos_token,
                extra: case.extra.as_ref(),
                now: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(expected.now)),
            };
            let ours = template.render(&case.messages, &options);
            compared += 1;
            let difference = match (&ours, &outcomes[&case.name]) {
                (Ok(ours), Outcome::Text(theirs)) if ours == theirs => continue,
                (Err(TextError::TemplateRefused { message }), Outcome::Refused(theirs))
                    if message == theirs =>
                {
                    continue;
                }
                // Messages of failures differ between the two engines; that both fail is what counts.
                (Err(TextError::Template { .. } | TextError::TemplateRefused { .. }), Outcome::Failed(_)) => {
                    continue;
                }
                (Ok(ours), Outcome::Text(theirs)) => {
                    let at = ours.bytes().zip(theirs.bytes()).take_while(|(a, b)| a == b).count();
                    let near = |text: &str| {
                        let bytes = &text.as_bytes()[at.saturating_sub(20)..text.len().min(at + 40)];
                        String::from_utf8_lossy(bytes).into_owned()
                    };
                    format!("byte {at}: ours {:?}, theirs {:?}", near(ours), near(theirs))
                }
                (ours, Outcome::Text(theirs)) => format!("ours {ours:?}, theirs {} bytes", theirs.len()),
                (ours, Outcome::Refused(theirs)) => format!("ours {ours:?}, theirs refuse: {theirs}"),
                (ours, Outcome::Failed(theirs)) => format!("ours {ours:?}, theirs fail: {theirs}"),
            };
            differences.push(format!("{name} / {}: {difference}", case.name));
        }
    }
    (compared, differences)
}

#[test]
fn templates_render_byte_for_byte_as_in_python() {
    let (compared, differences) = compare(&fixtures());
    assert!(compared >= 200, "only {compared} texts compared");
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// More templates than the repository may hold: `OSCAR_TEST_TEMPLATES` names a folder prepared with
/// `tools/make_text_fixtures.py templates FOLDER`.
#[test]
fn more_templates_render_as_in_python() {
    let Some(folder) = std::env::var_os("OSCAR_TEST_TEMPLATES") else {
        oscar_testing::skipped("OSCAR_TEST_TEMPLATES does not name a folder of templates");
        return;
    };
    let (compared, mut differences) = compare(Path::new(&folder));
    // Where Python stops at a value it cannot iterate over or serialise, we may go on.
    let all = differences.len();
    differences.retain(|difference| !difference.contains("theirs fail: TypeError"));
    println!("{compared} texts compared, {} more lenient than Python", all - differences.len());
    assert!(
        differences.is_empty(),
        "{} of {compared} differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

fn render(source: &str) -> Result<String, TextError> {
    let messages = [json!({"role": "user", "content": "Hi"})];
    ChatTemplate::from_source(source)?.render(&messages, &RenderOptions::default())
}

#[test]
fn values_print_as_python_prints_them() {
    let source = "{{ [true, none, 1, 1.0, 1e16, 1.5e-7, -0.0, 'a\\'b', \"x\\n\"] }}|{{ {'k': [false]} }}|{{ none }}|\
                  {{ true ~ 1 ~ none ~ missing }}|{{ missing }}|{{ 7 // 2 }}|{{ 6 / 2 }}|{{ 'ab' * 2 }}|{{ [1] * 2 + [3] }}|\
                  {{ 1.25|string + 'x' }}|{{ (1 + 2) * 3 }}|{{ true + 1 }}";
    assert_eq!(
        render(source).expect("renders"),
        "[True, None, 1, 1.0, 1e+16, 1.5e-07, -0.0, \"a'b\", 'x\\n']|{'k': [False]}|None|\
         True1None||3|3.0|abab|[1, 1, 3]|1.25x|9|2"
    );
}

#[test]
fn filters_slices_and_tests_mean_what_they_mean_in_python() {
    let source = "{{ [1, 'a']|trim }}|{{ [true, 1.0, none]|join('-') }}|{{ none|upper }}|{{ 'abcdef'[::-2] }}|{{ 'né中x'[1:-1] }}|\
        {{ [][::-1] }}|{{ [1, 2, 3][-2:] }}|{{ none is iterable }}|{{ [] is iterable }}|{{ 'x' is sequence }}|\
        {{ {} is sequence }}|{{ none is sequence }}|{{ '<a>'|safe + '<b>' }}|{{ '<a>' + '<b>' }}|{{ messages[::-1][0].role }}";
    assert_eq!(
        render(source).expect("renders"),
        "[1, 'a']|True-1.0-None|NONE|fdb|é中|[]|[2, 3]|False|True|True|True|False|<a>&lt;b&gt;|<a><b>|user"
    );
}

#[test]
fn tojson_writes_what_json_dumps_writes() {
    let source = "{% set v = {'b': [1, 2.0, true, none], 'a': 'é<>&\\'\"\\n', 'e': {}, 'l': []} %}\
        {{ v|tojson }}|{{ v|tojson(ensure_ascii=true) }}|{{ v|tojson(sort_keys=true, separators=(',', ':')) }}|{{ v|tojson(indent=2) }}";
    assert_eq!(
        render(source).expect("renders"),
        concat!(
            r#"{"b": [1, 2.0, true, null], "a": "é<>&'\"\n", "e": {}, "l": []}|"#,
            r#"{"b": [1, 2.0, true, null], "a": "\u00e9<>&'\"\n", "e": {}, "l": []}|"#,
            r#"{"a":"é<>&'\"\n","b":[1,2.0,true,null],"e":{},"l":[]}|"#,
            "{\n  \"b\": [\n    1,\n    2.0,\n    true,\n    null\n  ],\n  \"a\": \"é<>&'\\\"\\n\",\n  \"e\": {},\n  \"l\": []\n}"
        )
    );
}

#[test]
fn generation_tags_print_their_body() {
    let source = "a\n{%- generation -%}\n {{ messages[0].content }} \n{%- endgeneration -%}\nb";
    assert_eq!(render(source).expect("renders"), "aHib");
}

#[test]
fn errors_name_the_line() {
    let Err(TextError::Template { line, reason }) = render("one\ntwo\n{{ messages.nothing.here }}") else {
        panic!("an attribute of an undefined value is an error");
    };
    assert_eq!(line, 3, "{reason}");
    let Err(TextError::Template { line, .. }) = render("one\n{% if %}") else { panic!("a syntax error") };
    assert_eq!(line, 2);
    let Err(TextError::TemplateRefused { message }) = render("{{ raise_exception('no ' + 'system role') }}")
    else {
        panic!("refused");
    };
    assert_eq!(message, "no system role");
    assert!(matches!(render("{% include 'other' %}"), Err(TextError::Template { .. })));
}

#[test]
fn hostile_templates_stop_in_bounded_time_and_memory() {
    let double = "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(100) %}";
    let sources = [
        // Time.
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".to_owned(),
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
        "{% for i in range(10 ** 9) %}{% endfor %}".to_owned(),
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}".to_owned(),
        // Memory.
        format!("{double}{{% set ns.s = ns.s ~ ns.s %}}{{% endfor %}}"),
        format!("{double}{{% set ns.s = ns.s + ns.s %}}{{% endfor %}}"),
        format!("{double}{{% set ns.s = ns.s * 1000 %}}{{% endfor %}}"),
        format!("{double}{{% set ns.s = ns.s.replace('x', ns.s) %}}{{% endfor %}}"),
        format!("{double}{{% set ns.s = ns.s|replace('', ns.s) %}}{{% endfor %}}"),
        format!("{double}{{% set ns.s = ns.s.join(ns.s) %}}{{% endfor %}}"),
        format!("{double}{{% set ns.s = ns.s|indent(100000000, true) %}}{{% endfor %}}"),
        format!("{double}{{% set t %}}{{{{ ns.s }}}}{{{{ ns.s }}}}{{% endset %}}{{% set ns.s = t %}}{{% endfor %}}"),
        "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = ns.l + ns.l %}{% endfor %}".to_owned(),
        "{{ ([0] * 10000000000)|list|length }}".to_owned(),
        "{{ '%2000000000d'|format(1) }}".to_owned(),
        "{% set ns = namespace(l=[1]) %}{% for i in range(90000) %}{% set ns.l = ns.l * 2 %}{% endfor %}".to_owned(),
        // Depth.
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}".to_owned(),
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l|tojson }}"
            .to_owned(),
        format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000)),
        "x".repeat(1 << 20),
    ];
    for source in sources {
        let shown: String = source.chars().take(120).collect();
        match render(&source) {
            Err(TextError::TemplateLimit { .. } | TextError::Template { .. }) => {}
            other => panic!("{shown}: {:?}", other.map(|text| text.len())),
        }
    }
}

#[test]
fn deep_values_are_dropped_without_a_stack_overflow() {
    // A long conversation has the most fuel; the template nests until it runs out.
    let source = "{% set ns = namespace(l=[]) %}{% for a in range(90000) %}{% for i in range(90000) %}\
                  {% set ns.l = [ns.l] %}{% endfor %}{% endfor %}";
    let messages = vec![json!({"role": "user", "content": ""}); 5_000];
    let template = ChatTemplate::from_source(source).expect("compiles");
    let outcome = template.render(&messages, &RenderOptions::default());
    assert!(matches!(outcome, Err(TextError::TemplateLimit { .. })), "{outcome:?}");
}

#[test]
fn long_conversations_stay_within_the_limits() {
    let source = std::fs::read_to_string(fixtures().join("qwen3.jinja")).expect("template");
    let template = ChatTemplate::from_source(&source).expect("compiles");
    let text = "word ".repeat(2_000);
    let messages: Vec<Value> = (0..2_000)
        .map(|turn| json!({"role": if turn % 2 == 0 { "user" } else { "assistant" }, "content": text}))
        .collect();
    let rendered = template.render(&messages, &RenderOptions::default()).expect("20 MB of chat render");
    assert!(rendered.len() > 19_000_000);
}

#[test]
fn folders_hold_templates_in_several_shapes() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path();
    let options = RenderOptions { tools: Some(&[]), ..RenderOptions::default() };
    assert!(matches!(ChatTemplate::from_folder(path), Err(TextError::NoChatTemplate)));

    std::fs::write(path.join("tokenizer_config.json"), r#"{"chat_template": 5}"#).expect("write");
    assert!(matches!(ChatTemplate::from_folder(path), Err(TextError::File { .. })));

    let config =
        r#"{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}"#;
    std::fs::write(path.join("tokenizer_config.json"), config).expect("write");
    let template = ChatTemplate::from_folder(path).expect("a list");
    assert_eq!(template.render(&[], &RenderOptions::default()).expect("renders"), "D");
    assert_eq!(template.render(&[], &options).expect("renders"), "T");

    std::fs::write(path.join("chat_template.jinja"), "J").expect("write");
    let template = ChatTemplate::from_folder(path).expect("a file");
    assert_eq!(template.render(&[], &options).expect("renders"), "J");

    std::fs::write(path.join("chat_template.jinja"), [0xff, 0xfe]).expect("write");
    assert!(matches!(ChatTemplate::from_folder(path), Err(TextError::File { .. })));
}
