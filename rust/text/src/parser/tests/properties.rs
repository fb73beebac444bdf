use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// Parts of all formats, whole and in pieces.
fn fragments() -> impl Strategy<Value = String> {
    let fixed = select(vec![
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "analysis",
        "commentary to=functions.f",
        "final",
        "<|message|>",
        "<|constrain|>json",
        "<|end|>",
        "<|call|>",
        "<function=f>",
        "<function=",
        "<parameter=k>",
        "</parameter>",
        "</function>",
        "<function=typed>",
        "<parameter=b>",
        "<|python_tag|>typed.call(",
        "f.call(",
        "sn=",
        "b=",
        "True",
        ")",
        "'",
        "{\"name\": \"f\", \"arguments\": {",
        "{\"name\":\"g\",\"parameters\":{\"a\":[1,\"é\"]}}",
        "\"k\": ",
        "true",
        "12",
        "\"v\"",
        "\\",
        "\"",
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        ":",
        "<",
        ">",
        "|",
        "\n",
        " ",
        "```json\n",
        "```",
        "name",
        "é😀",
        "x",
        "function",
        "null",
        "\u{1}",
    ]);
    prop_oneof![
        4 => fixed.clone().prop_map(str::to_owned),
        1 => (fixed, 0..12_usize).prop_map(|(text, end)| text.chars().take(end).collect()),
    ]
}

fn text_of_fragments() -> impl Strategy<Value = String> {
    prop::collection::vec(fragments(), 0..16).prop_map(|parts| parts.concat())
}

/// The text cut at characters, `sizes` at a time.
fn cut<'a>(text: &'a str, sizes: &[usize]) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    for &size in sizes.iter().cycle().take_while(|_| text.len() < 1 << 20) {
        if rest.is_empty() {
            break;
        }
        let end = rest
            .char_indices()
            .nth(size)
            .map_or(rest.len(), |(at, _)| at);
        let (piece, later) = rest.split_at(end);
        pieces.push(piece);
        rest = later;
    }
    pieces.push(rest);
    pieces
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[a-z<>{}\\[\\]\"\\\\|/é😀 \n\t]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z\"{]{0,5}", inner, 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn arguments() -> impl Strategy<Value = Value> {
    prop::collection::btree_map("[a-zA-Z_]{1,6}", value(), 0..4)
        .prop_map(|fields| Value::Object(fields.into_iter().collect()))
}

/// How each format writes calls, and the text in front of them.
fn written(format: &str, before: &str, calls: &[(String, Value)], pretty: bool) -> String {
    let json = |value: &Value| {
        if pretty {
            serde_json::to_string_pretty(value).unwrap()
        } else {
            value.to_string()
        }
    };
    let objects = |key: &str| -> Vec<String> {
        calls
            .iter()
            .map(|(name, arguments)| json(&json!({"name": name, key: arguments})))
            .collect()
    };
    let each = |write: &dyn Fn(&str, String) -> String| -> String {
        calls
            .iter()
            .map(|(name, value)| write(name, json(value)))
            .collect()
    };
    match format {
        "hermes" => {
            let calls = objects("arguments");
            let calls: Vec<String> = calls
                .iter()
                .map(|c| format!("<tool_call>\n{c}\n</tool_call>"))
                .collect();
            format!("{before}{}", calls.join("\n"))
        }
        "llama3_json" => format!("{before}<|python_tag|>{}", objects("parameters").join("; ")),
        "mistral" => format!("{before}[TOOL_CALLS] [{}]", objects("arguments").join(", ")),
        "mistral named" => {
            before.to_owned() + &each(&|name, value| format!("[TOOL_CALLS]{name}[ARGS]{value}"))
        }
        "deepseek_v3" => {
            let calls = each(&|name, value| {
                format!(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{value}\n```<｜tool▁call▁end｜>\n"
                )
            });
            format!("{before}<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
        }
        "deepseek_v3 new" => {
            let calls = each(&|name, value| {
                format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{value}<｜tool▁call▁end｜>")
            });
            format!("{before}<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
        }
        "harmony" => {
            let calls = each(&|name, value| {
                format!(
                    "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{value}<|call|>"
                )
            });
            format!("<|channel|>commentary<|message|>{before}<|end|>{calls}")
        }
        _ => unreachable!("{format}"),
    }
}

const FORMATS: &[&str] = &[
    "hermes",
    "llama3_json",
    "mistral",
    "mistral named",
    "deepseek_v3",
    "deepseek_v3 new",
    "harmony",
];

proptest! {
    #[test]
    fn events_do_not_depend_on_how_the_text_is_cut(
        text in text_of_fragments(),
        sizes in prop::collection::vec(1..9_usize, 1..8),
    ) {
        for &names in ALL {
            let whole = events(parser(names), [text.as_str()]);
            check(&whole);
            prop_assert_eq!(&whole, &events(parser(names), cut(&text, &[1])), "{:?}", names);
            prop_assert_eq!(&whole, &events(parser(names), cut(&text, &sizes)), "{:?}", names);
        }
    }

    #[test]
    fn no_more_than_a_marker_waits_between_two_pieces(text in text_of_fragments()) {
        for &names in ALL {
            let mut parser = parser(names);
            let longest = parser.markers().iter().map(|marker| marker.len()).max().unwrap_or(0);
            for piece in cut(&text, &[1]) {
                parser.push(piece);
                for stage in [&parser.reasoning, &parser.tools].into_iter().flatten() {
                    prop_assert!(stage.waiting.len() <= longest);
                }
            }
        }
    }

    #[test]
    fn text_without_markers_passes_unchanged(text in "[^<\\[{]{0,40}", sizes in prop::collection::vec(1..9_usize, 1..8)) {
        let expected = if text.is_empty() { vec![] } else { vec![content(&text)] };
        for &names in ALL.iter().filter(|names| names.1 != Some("deepseek_r1") && !names.2) {
            prop_assert_eq!(&events(parser(names), cut(&text, &sizes)), &expected, "{:?}", names);
        }
    }

    #[test]
    fn calls_come_back_as_they_were_written(
        format in select(FORMATS.to_vec()),
        before in "[a-z é.\n]{0,10}",
        calls in prop::collection::vec(("[a-zA-Z_][a-zA-Z0-9_-]{0,8}", arguments()), 1..4),
        pretty: bool,
        sizes in prop::collection::vec(1..9_usize, 1..8),
    ) {
        let text = written(format, &before, &calls, pretty);
        let tools = format.split(' ').next();
        let found = events(parser((tools, None, false)), cut(&text, &sizes));
        check(&found);
        let mut events = found.into_iter().peekable();
        if let Some(Event::Content(text)) = events.next_if(|event| matches!(event, Event::Content(_))) {
            prop_assert_eq!(text, before);
        } else {
            prop_assert_eq!("", before);
        }
        for (at, (expected, arguments)) in calls.iter().enumerate() {
            let start = Event::ToolCallStart { index: at, name: expected.clone() };
            prop_assert_eq!(events.next(), Some(start));
            let Some(Event::ToolCallArguments { index, delta }) = events.next() else {
                return Err(TestCaseError::fail("no arguments"));
            };
            prop_assert_eq!(index, at);
            // As it was written, spaces and escapes included.
            prop_assert!(text.contains(&delta));
            prop_assert_eq!(&serde_json::from_str::<Value>(&delta).unwrap(), arguments);
            prop_assert_eq!(events.next(), Some(Event::ToolCallEnd { index: at, valid: true }));
        }
        prop_assert_eq!(events.next(), None);
    }

    #[test]
    fn parameters_of_qwen3_coder_come_back(
        texts in prop::collection::btree_map("[a-z]{1,5}", "[a-z0-9{}<>\"\\\\\n\té😀. -]{0,20}", 0..5),
        sizes in prop::collection::vec(1..9_usize, 1..8),
    ) {
        let parameters: String = texts
            .iter()
            .map(|(key, text)| format!("<parameter={key}>\n{text}\n</parameter>\n"))
            .collect();
        let text = format!("<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>");
        let found = events(parser((Some("qwen3_coder"), None, false)), cut(&text, &sizes));
        check(&found);
        let Event::ToolCallArguments { delta, .. } = &found[1] else {
            return Err(TestCaseError::fail("no arguments"));
        };
        let expected: serde_json::Map<String, Value> = texts
            .into_iter()
            .map(|(key, text)| {
                let parsed = serde_json::from_str(&text).ok().filter(|value: &Value| !value.is_string());
                (key, parsed.unwrap_or(Value::String(text)))
            })
            .collect();
        prop_assert_eq!(serde_json::from_str::<Value>(delta).unwrap(), Value::Object(expected));
    }
}

/// A megabyte of what takes long where work is repeated.
fn hostile() -> Vec<String> {
    const SIZE: usize = 1 << 20;
    let unit = [
        "<tool_call>",
        "<tool_cal",
        "<",
        "<tool_call>{",
        "<tool_call>{\"name\": \"f\", \"arguments\": {",
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}",
        "{\"name\": \"f\", \"parameters\": {}};",
        "{\"name\":",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        "[TOOL_CALLS]f[ARGS]{\"a\":",
        "[TOOL_CALLS]f{}",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<|channel|>",
        "<|channel|>commentary to=functions.f<|message|>{",
        "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        "<function=f><parameter=a>",
        "<function=f><parameter=a>1</parameter></function>",
        "<|python_tag|>",
        "<|python_tag|>f.call(a=",
        "<|python_tag|>f.call(a=1)",
        "<|python_tag|>f.call(a=\"x\", b=\"",
        "<think>",
        "</think>",
    ];
    let mut texts: Vec<String> = unit
        .iter()
        .map(|unit| unit.repeat(SIZE / unit.len()))
        .collect();
    let heads = [
        "<tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ",
        "{\"name\": \"f\", \"parameters\": {\"a\": ",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f[ARGS]{\"a\": ",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": ",
        "<|channel|>commentary to=functions.f<|message|>{\"a\": ",
        "<tool_call><function=f><parameter=a>",
        "<tool_call><function=typed><parameter=o>",
        "<|python_tag|>f.call(a=",
        "<|python_tag|>typed.call(n=\"",
        "<think>",
        "",
    ];
    for head in heads {
        for fill in [
            "[", "{\"a\":", "\"", "\\", "\"\\\"", " ", "\n", "t", "1", "true ", "a", "é", "]",
        ] {
            texts.push(format!("{head}{}", fill.repeat(SIZE / fill.len())));
            texts.push(format!("{head}\"{}", fill.repeat(SIZE / fill.len())));
        }
    }
    texts
}

#[test]
fn a_megabyte_of_any_hostile_text_goes_through_every_parser() {
    for text in hostile() {
        for &names in ALL.iter().filter(|names| names.0.is_some()) {
            let whole = events(parser(names), [text.as_str()]);
            check(&whole);
        }
    }
}
