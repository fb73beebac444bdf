use super::*;
use crate::parser::{
    ParserError, detect_reasoning_parser, detect_tool_parser, prompt_opens_reasoning,
};

/// The events of a text in one piece; they are the same when every character comes alone.
fn parse(tools: &str, text: &str) -> Vec<Event> {
    parse_with((Some(tools), None, false), text)
}

fn parse_with(names: (Option<&str>, Option<&str>, bool), text: &str) -> Vec<Event> {
    let whole = events(parser(names), [text]);
    let singles = events(parser(names), text.split_inclusive(|_| true));
    assert_eq!(whole, singles);
    check(&whole);
    whole
}

const NUL: &str = "";

#[test]
fn hermes_calls_have_content_in_front_of_them_and_none_between() {
    let text = "Let me see.\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"city\": \"Ōsaka }{\\\"\"}}\n</tool_call>\n\
                <tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>\n";
    let mut expected = vec![content("Let me see.\n")];
    expected.extend(call(0, "get", "{\"city\": \"Ōsaka }{\\\"\"}"));
    expected.extend(call(1, "now", "{}"));
    assert_eq!(parse("hermes", text), expected);
}

#[test]
fn the_keys_of_a_call_may_come_in_any_order_and_arguments_may_be_missing() {
    let text = r#"<tool_call>{"id": 7, "arguments": {"a": [1, {"b": null}]}, "more": [], "name": "f"}</tool_call>"#;
    assert_eq!(
        parse("hermes", text),
        call(0, "f", r#"{"a": [1, {"b": null}]}"#)
    );
    let text = r#"<tool_call>{"name": "f"}</tool_call>"#;
    assert_eq!(parse("hermes", text), call(0, "f", "{}"));
    let text =
        r#"<tool_call>{"name": "a\"\u00e9", "parameters": {}, "name": "b", "arguments": {"x": 1}}"#;
    assert_eq!(parse("hermes", text), call(0, "a\"é", "{}"));
}

#[test]
fn what_is_no_call_is_content_as_it_was_written() {
    for text in [
        "<tool_call>",
        "<tool_call> none</tool_call>",
        "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"text\"}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}",
        "<tool_call>{\"name\": \"f\", \"arguments\": 12}",
        "<tool_call>{\"arguments\": {\"x\": 1}}</tool_call>",
        "<tool_call>{\"name\": \"f\",, \"arguments\": {}}",
        "<tool_call>[{\"name\": \"f\", \"arguments\": {}}]</tool_call>",
        "<tool_call>{\"name\": \"f",
        "<tool_cal",
        "a < b <tool <tool_cal </tool_call>",
        NUL,
    ] {
        let expected = if text.is_empty() {
            vec![]
        } else {
            vec![content(text)]
        };
        assert_eq!(parse("hermes", text), expected);
    }
}

#[test]
fn a_call_that_breaks_off_is_not_valid_and_what_follows_is_content() {
    let text = r#"<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call>"#;
    let mut expected = broken_call(0, "f", r#"{"a": 1,"#);
    expected.push(content(r#", "b": 2}}</tool_call>"#));
    assert_eq!(parse("hermes", text), expected);
    let text = r#"<tool_call>{"name": "f", "arguments": {"a": "never ends"#;
    assert_eq!(
        parse("hermes", text),
        broken_call(0, "f", r#"{"a": "never ends"#)
    );
    // The next call is read all the same.
    let text = "<tool_call>{\"name\": \"f\", \"arguments\": {]<tool_call>{\"name\": \"g\"}";
    let mut expected = broken_call(0, "f", "{");
    expected.push(content("]"));
    expected.extend(call(1, "g", "{}"));
    assert_eq!(parse("hermes", text), expected);
}

#[test]
fn arguments_stream_before_the_call_is_complete() {
    let mut parser = parser((Some("hermes"), None, false));
    assert_eq!(parser.push("<tool_call>{\"name\": \"f\", "), []);
    let start = Event::ToolCallStart {
        index: 0,
        name: "f".to_owned(),
    };
    let delta = |text: &str| Event::ToolCallArguments {
        index: 0,
        delta: text.to_owned(),
    };
    assert_eq!(parser.push("\"arguments\": {\"a"), [start, delta("{\"a")]);
    assert_eq!(parser.push("\": 1"), [delta("\": 1")]);
    let end = Event::ToolCallEnd {
        index: 0,
        valid: true,
    };
    assert_eq!(parser.push("}}</to"), [delta("}"), end]);
    assert_eq!(parser.push("ol_call>"), []);
    assert_eq!(parser.finish(), []);
    assert_eq!(parser.push("late"), []);
}

#[test]
fn no_half_marker_is_ever_shown() {
    let mut parser = parser((Some("hermes"), Some("qwen3"), false));
    assert_eq!(parser.push("<thi"), []);
    assert_eq!(parser.push("nk>\nhm"), [reasoning("hm")]);
    assert_eq!(parser.push(" a</th"), [reasoning(" a")]);
    assert_eq!(parser.push("i"), []);
    assert_eq!(
        parser.push("s</think>\n\nb<tool"),
        [reasoning("</this"), content("b")]
    );
    assert_eq!(parser.push("s"), [content("<tools")]);
    assert_eq!(parser.push("<tool_"), []);
    assert_eq!(parser.finish(), [content("<tool_")]);
}

#[test]
fn llama_calls_need_no_marker_and_may_have_one() {
    let json = r#"{"name": "get", "parameters": {"city": "Oslo"}}"#;
    let one = call(0, "get", r#"{"city": "Oslo"}"#);
    assert_eq!(parse("llama3_json", json), one);
    assert_eq!(parse("llama3_json", &format!("<|python_tag|>{json}")), one);
    let typed = r#"{"type": "function", "name": "get", "arguments": {"city": "Oslo"}}"#;
    assert_eq!(parse("llama3_json", typed), one);
    let two = [one.clone(), call(1, "get", r#"{"city": "Oslo"}"#)].concat();
    for separator in [";", "; ", ", ", "\n", ""] {
        assert_eq!(
            parse("llama3_json", &format!("{json}{separator}{json}")),
            two
        );
    }
    let text = format!("I look it up. <|python_tag|>{json}");
    assert_eq!(
        parse("llama3_json", &text),
        [vec![content("I look it up. ")], one].concat()
    );
}

#[test]
fn json_that_is_an_answer_is_content_in_llama_too() {
    for text in [
        r#"{"name": "Ada", "age": 36}"#,
        r#"{"name": "Ada"}"#,
        r#"{"answer": {"name": "f", "parameters": {}}}"#,
        r#"{"parameters": {"a": 1}}"#,
        r#"The call is {"name": "f", "parameters": {}}"#,
        "<|python_tag|>print(1)",
        "{}",
        "{",
    ] {
        assert_eq!(parse("llama3_json", text), [content(text)]);
    }
    let text = r#"{"name": "f", "parameters": {}}; done"#;
    let expected = [call(0, "f", "{}"), vec![content(";done")]].concat();
    assert_eq!(parse("llama3_json", text), expected);
}

#[test]
fn mistral_calls_come_as_a_list_or_one_by_one() {
    let list = r#"[TOOL_CALLS] [{"name": "a", "arguments": {"x": [1]}}, {"name": "b", "arguments": {}, "id": "q"}]"#;
    let two = [call(0, "a", r#"{"x": [1]}"#), call(1, "b", "{}")].concat();
    assert_eq!(parse("mistral", list), two);
    let named = r#"[TOOL_CALLS]a[ARGS]{"x": [1]}[TOOL_CALLS]b[CALL_ID]q12[ARGS]{}"#;
    assert_eq!(parse("mistral", named), two);
    assert_eq!(
        parse("mistral", r#"[TOOL_CALLS]a{"x": [1]}[TOOL_CALLS]b{}"#),
        two
    );
    assert_eq!(
        parse(
            "mistral",
            r#"[TOOL_CALLS]{"name": "a", "arguments": {"x": [1]}}"#
        ),
        two[..3]
    );
    for text in [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]a, b",
        "[TOOL_CALLS]a[ARGS]",
        "[TOOL_CALLS][[]{}",
    ] {
        assert_eq!(parse("mistral", text), [content(text)]);
    }
    let long = format!("[TOOL_CALLS]{}{{}}", "a".repeat(1000));
    assert_eq!(parse("mistral", &long), [content(&long)]);
}

#[test]
fn both_ways_of_deepseek_to_write_calls_are_read() {
    let old = "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n\
               <｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let new = "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\
               <｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let expected = [
        vec![content("Sure.")],
        call(0, "get", "{\"a\": 1}"),
        call(1, "now", "{}"),
    ]
    .concat();
    assert_eq!(parse("deepseek_v3", old), expected);
    assert_eq!(parse("deepseek_v3", new), expected);
    for text in [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>and so on",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get{}",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g e t{}",
    ] {
        assert_eq!(parse("deepseek_v3", text), [content(text)]);
    }
}

#[test]
fn the_channels_of_gpt_oss_are_told_apart() {
    let text = "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary<|message|>One \
                moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{\"a\": \
                \"<|end|>\"}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>\
                <|start|>assistant<|channel|>final<|message|>It is <b>.";
    let expected = [
        vec![reasoning("The user asks."), content("One moment.")],
        call(0, "get", "{\"a\": \"<|end|>\"}"),
        call(1, "now", "{}"),
        vec![content("It is <b>.")],
    ]
    .concat();
    assert_eq!(parse("harmony", text), expected);
    assert_eq!(parse_with((None, Some("gpt_oss"), false), text), expected);
}

#[test]
fn harmony_texts_that_follow_no_format_lose_nothing_that_can_be_shown() {
    assert_eq!(parse("harmony", "plain text"), [content("plain text")]);
    assert_eq!(parse("harmony", "<|channel|>final"), []);
    assert_eq!(
        parse("harmony", "<|channel|>analysis<|message|>cut"),
        [reasoning("cut")]
    );
    let python = "<|start|>assistant<|channel|>commentary to=python<|message|>print(1)<|call|>";
    assert_eq!(parse("harmony", python), [content("print(1)")]);
    let long = format!("<|channel|>{}", "é".repeat(2000));
    assert_eq!(parse("harmony", &long), [content(&long)]);
    let broken = "<|channel|>commentary to=functions.f<|message|>{\"a\": tru}<|call|>";
    let expected = [broken_call(0, "f", "{\"a\": tru"), vec![content("}")]].concat();
    assert_eq!(parse("harmony", broken), expected);
}

#[test]
fn qwen3_coders_parameters_become_json() {
    let text = "Now.\n<tool_call>\n<function=edit>\n<parameter=path>\na \"b\".py\n</parameter>\n<parameter=text>\n\nif x:\n\
                \tpass\n\n</parameter>\n<parameter=line>\n12\n</parameter>\n<parameter=all>\ntrue\n</parameter>\n\
                <parameter=tags>\n[\"a\", 1.0]\n</parameter>\n<parameter=word>trues</parameter>\n<parameter=date>\n2024-01-02\n\
                </parameter>\n<parameter=none></parameter></function>\n</tool_call>\n<tool_call><function=now></function></tool_call>";
    let arguments = r#"{"path": "a \"b\".py", "text": "\nif x:\n\tpass\n", "line": 12, "all": true, "tags": ["a", 1.0], "word": "trues", "date": "2024-01-02", "none": ""}"#;
    let expected = [
        vec![content("Now.\n")],
        call(0, "edit", arguments),
        call(1, "now", "{}"),
    ]
    .concat();
    assert_eq!(parse("qwen3_coder", text), expected);
    let bare = text.replace("<tool_call>\n", "").replace("<tool_call>", "");
    assert_eq!(parse("qwen3_coder", &bare)[..4], expected[..4]);
    for text in [
        "<tool_call> x",
        "<tool_call><function=>",
        "<function=a b>",
        "<function=f",
    ] {
        assert_eq!(parse("qwen3_coder", text), [content(text)]);
    }
    let cut = "<function=f><parameter=a>\ntext\n</para";
    assert_eq!(
        parse("qwen3_coder", cut),
        broken_call(0, "f", "{\"a\": \"text")
    );
}

#[test]
fn reasoning_ends_at_its_marker_and_may_be_open_from_the_start() {
    let qwen = |open, text: &str| parse_with((None, Some("qwen3"), open), text);
    let both = [reasoning("why\n"), content("because")];
    assert_eq!(qwen(false, "<think>\nwhy\n</think>\n\nbecause"), both);
    assert_eq!(qwen(true, "\nwhy\n</think>\n\nbecause"), both);
    assert_eq!(qwen(true, "<think>why\n</think>because"), both);
    assert_eq!(
        parse_with((None, Some("deepseek_r1"), false), "why\n</think>because"),
        both
    );
    assert_eq!(
        qwen(false, "<think>\n\n</think>\n\nbecause"),
        [content("because")]
    );
    assert_eq!(
        qwen(false, " plain <think> text"),
        [content(" plain <think> text")]
    );
    assert_eq!(qwen(true, "cut of"), [reasoning("cut of")]);
    assert_eq!(qwen(true, "cut </thi"), [reasoning("cut </thi")]);
    let call_inside =
        "<think>a <tool_call>{\"name\": \"f\"}</tool_call></think><tool_call>{\"name\": \"g\"}";
    let expected = [
        vec![reasoning("a <tool_call>{\"name\": \"f\"}</tool_call>")],
        call(0, "g", "{}"),
    ];
    assert_eq!(
        parse_with((Some("hermes"), Some("qwen3"), false), call_inside),
        expected.concat()
    );
}

#[test]
fn a_call_that_does_not_name_itself_within_the_limit_is_content() {
    use crate::parser::call::MAX_HELD_BYTES;
    let fits = |extra: usize| {
        let head = "<tool_call>{\"x\": \"";
        let tail = "\", \"name\": \"f\", \"arguments\": {";
        let filler = "é".repeat((MAX_HELD_BYTES - head.len() - tail.len() + extra) / 2);
        format!("{head}{filler}{tail}}}}}")
    };
    assert_eq!(parse("hermes", &fits(0)), call(0, "f", "{}"));
    let long = fits(4);
    assert_eq!(parse("hermes", &long), [content(&long)]);
}

#[test]
fn unknown_names_and_pairs_that_exclude_each_other_are_refused_by_name() {
    let error = OutputParser::new(Some("pythonic"), None, false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tool_parser is \"pythonic\", supported: hermes, llama3_json, mistral, deepseek_v3, harmony, qwen3_coder"
    );
    let error = OutputParser::new(None, Some("x"), false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "reasoning_parser is \"x\", supported: qwen3, deepseek_r1, gpt_oss"
    );
    for (tool, reasoning) in [("hermes", "gpt_oss"), ("harmony", "qwen3")] {
        let error = OutputParser::new(Some(tool), Some(reasoning), false).unwrap_err();
        assert!(matches!(error, ParserError::Incompatible { .. }));
    }
}

#[test]
fn the_markers_that_must_be_in_the_text_are_known() {
    let markers = |names| parser(names).markers().to_vec();
    assert_eq!(
        markers((Some("hermes"), Some("qwen3"), false)),
        ["</think>", "</tool_call>", "<think>", "<tool_call>"]
    );
    assert_eq!(markers((None, None, false)), [""; 0]);
    assert!(markers((None, Some("gpt_oss"), false)).contains(&"<|channel|>"));
}

#[test]
fn templates_show_which_parsers_they_call_for() {
    let both = |template| {
        (
            detect_tool_parser(template),
            detect_reasoning_parser(template),
        )
    };
    assert_eq!(both("{{ '<|im_start|>' }}"), (None, None));
    assert_eq!(both("<tool_call>\\n{\\\"name\\\""), (Some("hermes"), None));
    assert_eq!(
        both("<tool_call> {% if enable_thinking %}<think>"),
        (Some("hermes"), Some("qwen3"))
    );
    assert_eq!(
        both("<tool_call><function=x><parameter=y>"),
        (Some("qwen3_coder"), None)
    );
    assert_eq!(
        both("[AVAILABLE_TOOLS][TOOL_CALLS]"),
        (Some("mistral"), None)
    );
    assert_eq!(
        both("<｜Assistant｜><think>\\n <｜tool▁calls▁begin｜>"),
        (Some("deepseek_v3"), Some("deepseek_r1"))
    );
    assert_eq!(
        both("{% if thinking %}<｜Assistant｜><think></think><｜tool▁calls▁begin｜>"),
        (Some("deepseek_v3"), Some("qwen3"))
    );
    assert_eq!(
        both("<|channel|>analysis<|message|>"),
        (Some("harmony"), Some("gpt_oss"))
    );
    assert_eq!(
        both("<|start_header_id|> {\"name\":, \"parameters\":"),
        (Some("llama3_json"), None)
    );
    assert!(prompt_opens_reasoning("<|im_start|>assistant\n<think>\n"));
    assert!(!prompt_opens_reasoning("<think>\n\n</think>\n\n"));
}
