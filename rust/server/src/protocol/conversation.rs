//! From the messages of a body to a prompt, and to how its answer is read.

use octavo_grammar::calls;
use octavo_text::parser;
use octavo_text::template::{RenderOptions, TemplateError};
use serde_json::{Map, Value};

use super::body::Body;
use super::message::AnswerFormat;
use crate::error::ApiError;
use crate::model::Model;

/// What a conversation became.
pub(crate) struct Rendered {
    pub(crate) ids: Vec<u32>,
    pub(crate) answer: AnswerFormat,
}

/// Takes `messages`, `tools` and the options of the template out of a body and renders them.
pub(crate) fn render(body: &mut Body, model: &Model) -> Result<Rendered, ApiError> {
    let messages = messages(body.take("messages"))?;
    let calls::Choice { told, force } = tools(body)?;
    let tools = (!told.is_empty()).then_some(Value::Array(told));
    let continued = body.flag("continue_final_message", false)?;
    let add_generation_prompt = body.flag("add_generation_prompt", !continued)?;
    let one_call = !body.flag("parallel_tool_calls", true)?;
    let kwargs = kwargs(body)?;
    body.unsupported(
        "chat_template",
        &[],
        // A template is a program that can take any amount of memory.
        "left out: a template comes from the model's files or --chat-template",
    )?;

    let tokenizer = model.require_tokenizer()?;
    let Some(format) = &model.chat else {
        return Err(ApiError::invalid(
            "this model has no chat template, so it is probably a base model: use /v1/completions, or start the server with --chat-template",
        ));
    };
    if let Some(given) = &tools {
        if !format.writes_tools {
            return Err(ApiError::field(
                "tools",
                "left out: the chat template has no place for tools",
                given,
            ));
        }
        if !format.reads_tools {
            let allowed = "left out, or the server started with --tool-call-parser: the chat template does not tell how calls are written";
            return Err(ApiError::field("tools", allowed, given));
        }
    }
    let options = RenderOptions {
        tools: tools.as_ref(),
        add_generation_prompt,
        continue_final_message: continued,
        kwargs: Some(&kwargs),
    };
    let prompt = format
        .template
        .render(&messages, &options)
        .map_err(refused)?;
    let ids = tokenizer
        .encode_prompt(&prompt)
        .map_err(|error| ApiError::invalid(format!("messages cannot be tokenized: {error}")))?;
    if ids.is_empty() {
        return Err(ApiError::field(
            "messages",
            "such that the chat template writes something",
            &messages,
        ));
    }
    let is_open = if continued {
        ends_inside_reasoning(&messages)
    } else {
        parser::prompt_opens_reasoning(&prompt.text)
    };
    let answer = AnswerFormat::new(format, tools, force, is_open, continued, one_call);
    Ok(Rendered { ids, answer })
}

fn refused(error: TemplateError) -> ApiError {
    let param = match &error {
        TemplateError::InvalidOption { param, .. } => param.clone(),
        _ => "messages".to_owned(),
    };
    ApiError {
        param: Some(param),
        ..ApiError::invalid(error.to_string())
    }
}

/// The outer form of a conversation; the template judges the rest.
fn messages(value: Option<Value>) -> Result<Value, ApiError> {
    let value = value.unwrap_or_default();
    let Some(list) = value.as_array().filter(|list| !list.is_empty()) else {
        return Err(ApiError::field(
            "messages",
            "a non-empty list of messages",
            &value,
        ));
    };
    for (i, message) in list.iter().enumerate() {
        if !message["role"].is_string() {
            return Err(ApiError::field(
                &format!("messages[{i}]"),
                "an object with a 'role'",
                message,
            ));
        }
        let content = format!("messages[{i}].content");
        match &message["content"] {
            Value::Null | Value::String(_) => {}
            Value::Array(parts) => parts
                .iter()
                .try_for_each(|part| text_part(&content, part))?,
            other => {
                return Err(ApiError::field(
                    &content,
                    "text, a list of text parts, or null",
                    other,
                ));
            }
        }
    }
    Ok(value)
}

fn text_part(param: &str, part: &Value) -> Result<(), ApiError> {
    match part["type"].as_str() {
        Some("text") if part["text"].is_string() => Ok(()),
        Some("text") | None => Err(ApiError::field(param, "made of text parts", part)),
        Some(kind) => Err(ApiError::unsupported_content(param, kind)),
    }
}

/// The tools that the model is told of, and whether it must call.
fn tools(body: &mut Body) -> Result<calls::Choice, ApiError> {
    let old = "left out: 'tools' is the newer form";
    body.unsupported("functions", &[Value::Array(Vec::new())], old)?;
    body.unsupported("function_call", &["none".into(), "auto".into()], old)?;
    let choice = body.take("tool_choice");
    let tools = body.list("tools")?.unwrap_or_default();
    Ok(calls::choose(tools, choice.as_ref())?)
}

/// Further variables of the template.
fn kwargs(body: &mut Body) -> Result<Map<String, Value>, ApiError> {
    let mut kwargs = match body.take("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(kwargs)) => kwargs,
        Some(other) => return Err(ApiError::field("chat_template_kwargs", "an object", &other)),
    };
    if let Some(effort) = body.string("reasoning_effort")? {
        kwargs
            .entry("reasoning_effort")
            .or_insert(Value::String(effort));
    }
    Ok(kwargs)
}

/// Whether the text of a message that is to be continued has opened its reasoning and not closed it.
fn ends_inside_reasoning(messages: &Value) -> bool {
    let last = messages.as_array().and_then(|list| list.last());
    let content = last.map(|message| &message["content"]);
    let text = match content {
        Some(Value::Array(parts)) => parts.last().and_then(|part| part["text"].as_str()),
        Some(Value::String(text)) => Some(text.as_str()),
        _ => None,
    };
    text.is_some_and(|text| text.rfind("<think>") > text.rfind("</think>"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn content_that_is_no_text_is_refused_and_never_dropped() {
        for kind in ["image_url", "input_audio", "file", "video_url"] {
            let given = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]);
            let error = messages(Some(given)).unwrap_err();
            assert_eq!(error.code, Some("unsupported_content"));
            assert_eq!(error.param.as_deref(), Some("messages[0].content"));
        }
    }

    #[test]
    fn a_conversation_is_a_list_of_messages_with_roles() {
        for wrong in [
            json!([]),
            json!({}),
            json!("a"),
            json!([1]),
            json!([{"content": "a"}]),
            json!([{"role": "user", "content": 3}]),
        ] {
            assert!(messages(Some(wrong.clone())).is_err(), "{wrong}");
        }
        assert!(messages(None).is_err());
        let replayed = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": []}]);
        assert!(messages(Some(replayed)).is_ok());
    }

    #[test]
    fn a_message_that_is_continued_may_be_inside_its_reasoning() {
        for (text, expected) in [
            ("<think>hm", true),
            ("<think>hm</think>a", false),
            ("a", false),
            ("</think><think>", true),
        ] {
            let given = json!([{"role": "user", "content": "<think>"}, {"role": "assistant", "content": text}]);
            assert_eq!(ends_inside_reasoning(&given), expected, "{text}");
        }
    }
}
