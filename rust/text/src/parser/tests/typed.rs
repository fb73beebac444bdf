//! Values that are written without types, and Llama's built-in calls.

use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// The arguments and whether they are whole, of a text that is one call; the same when every character comes alone.
fn arguments(tools: &str, text: &str) -> (String, bool) {
    let names = (Some(tools), None, false);
    let whole = events(parser(names), [text]);
    assert_eq!(whole, events(parser(names), text.split_inclusive(|_| true)));
    check(&whole);
    let [
        Event::ToolCallStart { .. },
        Event::ToolCallArguments { delta, .. },
        Event::ToolCallEnd { valid, .. },
        ..,
    ] = &whole[..]
    else {
        panic!("no call: {whole:?}");
    };
    (delta.clone(), *valid)
}

fn coder(parameters: &[(&str, &str)]) -> Value {
    let written: String = parameters
        .iter()
        .map(|(key, text)| format!("<parameter={key}>\n{text}\n</parameter>\n"))
        .collect();
    let text = format!("<tool_call>\n<function=typed>\n{written}</function>\n</tool_call>");
    let (found, valid) = arguments("qwen3_coder", &text);
    assert!(valid);
    serde_json::from_str(&found).unwrap()
}

fn builtin(inside: &str) -> (String, bool) {
    arguments(
        "llama3_json",
        &format!("<|python_tag|>typed.call({inside})"),
    )
}

#[test]
fn a_string_by_its_schema_is_one_whatever_it_looks_like() {
    for text in [
        "0123",
        "12",
        "true",
        "null",
        "[1, 2]",
        "{\"a\": 1}",
        "",
        "  ",
        "\"x\"",
    ] {
        assert_eq!(coder(&[("s", text)]), json!({"s": text}));
    }
    assert_eq!(
        coder(&[("s", "12"), ("unknown", "12")]),
        json!({"s": "12", "unknown": 12})
    );
}

#[test]
fn a_string_by_its_schema_is_passed_on_at_once() {
    let mut parser = parser((Some("qwen3_coder"), None, false));
    parser.push("<function=typed><parameter=s>");
    let delta = |text: &str| Event::ToolCallArguments {
        index: 0,
        delta: text.to_owned(),
    };
    assert_eq!(parser.push("12"), [delta("\"12")]);
    assert_eq!(parser.push("3\n"), [delta("3")]);
    assert_eq!(parser.push("4</parameter>"), [delta("\\n4\"")]);
}

#[test]
fn what_can_be_no_string_may_be_written_as_in_python_and_the_rest_stays_text() {
    assert_eq!(
        coder(&[
            ("b", "True"),
            ("n", "1.5e3"),
            ("o", "{\"a\": [1]}"),
            ("l", "[]"),
            ("sn", "None")
        ]),
        json!({"b": true, "n": 1.5e3, "o": {"a": [1]}, "l": [], "sn": "None"})
    );
    // Of another type than the schema allows: text, as it was written.
    assert_eq!(
        coder(&[
            ("b", "1"),
            ("n", "[1]"),
            ("o", "[1]"),
            ("l", "{}"),
            ("sn", "true")
        ]),
        json!({"b": "1", "n": "[1]", "o": "[1]", "l": "{}", "sn": "true"})
    );
    assert_eq!(
        coder(&[("sn", "null"), ("n", "one")]),
        json!({"sn": null, "n": "one"})
    );
    assert_eq!(
        coder(&[("sn", "7"), ("b", "Truest")]),
        json!({"sn": 7, "b": "Truest"})
    );
}

#[test]
fn built_in_tools_are_called_as_in_python() {
    let text = r#"I look. <|python_tag|>brave_search.call(query="who is "#;
    let whole = format!("{text}Ada?\", count=3, safe=True , x = None)");
    let found = events(parser((Some("llama3_json"), None, false)), [whole.as_str()]);
    let arguments = r#"{"query": "who is Ada?", "count": 3, "safe": true, "x": null}"#;
    assert_eq!(
        found,
        [
            vec![content("I look. ")],
            call(0, "brave_search", arguments)
        ]
        .concat()
    );
    let found = events(parser((Some("llama3_json"), None, false)), [text]);
    assert_eq!(
        found,
        [
            vec![content("I look. ")],
            broken_call(0, "brave_search", "{\"query\": \"who is ")
        ]
        .concat()
    );
    assert_eq!(builtin(""), ("{}".to_owned(), true));
}

#[test]
fn values_of_built_in_tools_have_the_types_of_the_schema() {
    assert_eq!(
        builtin(r#"n="5", b="true", s=5, sn="5", o="{\"a\": 1}", l="x""#),
        (
            r#"{"n": 5, "b": true, "s": "5", "sn": "5", "o": {"a": 1}, "l": "x"}"#.to_owned(),
            true
        )
    );
    assert_eq!(builtin("s=True").0, r#"{"s": "True"}"#);
    assert_eq!(builtin("sn=5, s='it\\'s'").0, r#"{"sn": 5, "s": "it's"}"#);
}

#[test]
fn what_is_no_built_in_call_is_content_and_one_that_breaks_off_ends() {
    let parse = |text: &str| events(parser((Some("llama3_json"), None, false)), [text]);
    for text in [
        "<|python_tag|>print(1)",
        "<|python_tag|>.call(x=1)",
        "<|python_tag|>a b.call()",
        "<|python_tag|>",
        "<|python_tag|>  ",
        "<|python_tag|>f.call",
        "<|python_tag|>import os",
    ] {
        assert_eq!(parse(text), [content(text)]);
    }
    for (text, arguments, rest) in [
        ("<|python_tag|>f.call(a=1;b)", "{\"a\": ", "<rest>"),
        ("<|python_tag|>f.call(a=[1])", "{\"a\": ", "<rest>"),
        ("<|python_tag|>f.call(a=\"x\" b=1)", "{\"a\": \"x\"", "b=1)"),
    ] {
        let found = parse(text);
        assert_eq!(found[..3], broken_call(0, "f", arguments), "{text}");
        if rest != "<rest>" {
            assert_eq!(found[3..], [content(rest)]);
        }
    }
}

/// A value as a text, and what it is when its parameter has these types.
fn expected(types: &[&str], text: &str) -> Value {
    let parsed: Option<Value> = serde_json::from_str(text).ok();
    let kind = parsed.as_ref().map(|value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "none",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    });
    match (parsed, kind) {
        (Some(value), Some(kind)) if types.contains(&kind) => value,
        _ => Value::from(text),
    }
}

proptest! {
    #[test]
    fn a_value_is_json_exactly_if_it_is_of_an_allowed_type(
        key in select(vec!["s", "n", "b", "o", "l", "sn", "other"]),
        text in prop_oneof![
            "[a-z0-9{}<>\"\\\\\n\té😀. -]{0,12}",
            select(vec!["12", "-1.5", "true", "false", "null", "[1, \"a\"]", "{}", "{\"a\": null}", "nul", "1 2", "[", "0x1"])
                .prop_map(str::to_owned),
        ],
    ) {
        let types: &[&str] = match key {
            "s" => &[],
            "n" => &["number"],
            "b" => &["boolean"],
            "o" => &["object"],
            "l" => &["array"],
            "sn" => &["number", "null"],
            _ => &["number", "boolean", "object", "array", "null"],
        };
        prop_assert_eq!(coder(&[(key, &text)]), json!({key: expected(types, &text)}));
    }

    #[test]
    fn strings_of_built_in_calls_come_back(
        texts in prop::collection::btree_map("[a-z_]{3,6}", "[a-z{}<>()=,\"'\\\\\n\té😀. -]{0,16}", 0..4),
        single: bool,
    ) {
        let quote = if single { '\'' } else { '"' };
        let written: Vec<String> = texts
            .iter()
            .map(|(key, text)| {
                let inside = text.replace('\\', "\\\\").replace(quote, &format!("\\{quote}"));
                format!("{key}={quote}{inside}{quote}")
            })
            .collect();
        let (found, valid) = builtin(&written.join(", "));
        prop_assert!(valid);
        prop_assert_eq!(serde_json::from_str::<Value>(&found).unwrap(), json!(texts));
    }
}
