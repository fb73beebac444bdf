//! `/v1/responses`: nothing is stored, so a conversation comes whole with each request.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use octavo_grammar::constraint::{self, Given};
use serde_json::{Map, Value, json};

use super::body::Body;
use super::collect::{Session, Step};
use super::completions::truncate;
use super::conversation::{self, Rendered};
use super::message::AnswerFormat;
use super::reply::{now, random_hex};
use super::responses_output::Output;
use super::sampling::{Sampling, Wanted};
use super::scores::Scorer;
use super::sse::{self, Events};
use crate::app::{App, Tenant};
use crate::config::UnknownFields;
use crate::engine::NewRequest;
use crate::error::ApiError;
use crate::model::Model;

/// What `include` may ask for.
const LOGPROBS: &str = "message.output_text.logprobs";

/// A body that has been checked whole.
struct Request {
    stream: bool,
    /// What a response says of its request.
    told: Map<String, Value>,
    sampling: Sampling,
    request: NewRequest,
    answer: AnswerFormat,
}

pub(crate) async fn responses(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    body: Bytes,
) -> Result<Response, ApiError> {
    let parse =
        move |bytes: &[u8], app: &App, model: &Model| Request::parse(bytes, app, model, tenant);
    let (model, request) = app.parse(body, parse).await?;
    let scorer = Scorer {
        tokenizer: model.tokenizer.clone(),
        top: request.sampling.logprobs(),
    };
    let mut output = Output::new(request.told, request.answer.reader()?, scorer)?;
    let lengths = [request.request.prompt.len()];
    let ticket = app.submit(vec![request.request], &model).await?;
    let text = &request.sampling.text;
    let tokenizer = model.tokenizer.as_ref();
    let mut session = Session::new(ticket, tokenizer, text, &lengths, 1, &app.metrics)?;
    if request.stream {
        return Ok(sse::response(session, output));
    }
    // The same events, which nobody reads.
    let mut events = Events::default();
    while let Some(step) = session.next().await {
        match step {
            Step::Failed(error) => return Err(error),
            Step::Prompt { .. } => {}
            Step::Pieces { pieces, .. } => output.extend(pieces, &mut events),
        }
        events.clear();
    }
    Ok(Json(output.finish(&session.usage, &mut events)).into_response())
}

impl Request {
    fn parse(bytes: &[u8], app: &App, model: &Model, tenant: Tenant) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let name = app.model_name(body.string("model")?)?;
        body.rename("max_output_tokens", "max_tokens")?;
        let max_output_tokens = body.get("max_tokens").clone();
        let wanted = Wanted {
            rest_of_context: true,
            logprobs: logprobs(&mut body, model)?,
            prompt_logprobs: None,
        };
        let mut sampling = Sampling::take(&mut body, model, wanted)?;
        if sampling.n() != 1 {
            return Err(ApiError::field("n", "1", &sampling.n().into()));
        }
        let stream = body.flag("stream", false)?;
        unsupported(&mut body)?;
        if let Some(given) = text(&mut body)? {
            if let Some(other) = &sampling.constraint {
                let allowed = format!("left out beside {}", other.param);
                return Err(ApiError::field(
                    "text.format",
                    allowed,
                    &Value::from("given"),
                ));
            }
            sampling.constraint = Some(given);
        }
        let instructions = body.string("instructions")?;
        let mut told = Map::new();
        for name in ["tools", "tool_choice", "parallel_tool_calls"] {
            told.insert(name.to_owned(), body.get(name).clone());
        }
        let mut conversation = conversation(&mut body, instructions.as_deref())?;
        body.finish(app.config.unknown_fields)?;

        let Rendered { mut ids, answer } = conversation::render(&mut conversation, model)
            .map_err(|error| error.renamed("messages", "input"))?;
        truncate(&mut ids, &sampling, model.info.max_model_len);
        sampling.text.shown_special_ids = answer.shown_special_ids(model.require_tokenizer()?)?;
        let grammar = answer.grammar(sampling.constraint.as_ref(), model)?;
        let request = app
            .new_request(ids, &sampling, grammar, model, tenant)
            .map_err(|error| error.renamed("prompt", "input"))?;
        told.insert("id".to_owned(), format!("resp_{}", random_hex()?).into());
        told.insert("created_at".to_owned(), now().into());
        told.insert("model".to_owned(), name.into());
        told.insert("instructions".to_owned(), instructions.into());
        told.insert("max_output_tokens".to_owned(), max_output_tokens);
        told.insert("temperature".to_owned(), request.params.temperature.into());
        told.insert("top_p".to_owned(), request.params.top_p.into());
        Ok(Self {
            stream,
            told,
            sampling,
            request,
            answer,
        })
    }
}

/// How many likeliest tokens are wanted at each position, if log-probabilities are to be included.
fn logprobs(body: &mut Body, model: &Model) -> Result<Option<u32>, ApiError> {
    let most = i64::from(model.info.max_logprobs.min(model.info.vocab_size));
    let top = body.integer("top_logprobs", 0, most)?.map(|top| top as u32);
    let include = body.strings("include")?;
    if let Some(other) = include.iter().find(|name| *name != LOGPROBS) {
        let allowed = format!("a list of nothing but '{LOGPROBS}'");
        return Err(ApiError::field(
            "include",
            allowed,
            &Value::from(other.as_str()),
        ));
    }
    match (include.is_empty(), top) {
        (false, top) => Ok(Some(top.unwrap_or(0))),
        (true, None | Some(0)) => Ok(None),
        (true, Some(top)) => Err(ApiError::field(
            "top_logprobs",
            format!("left out unless 'include' has '{LOGPROBS}'"),
            &top.into(),
        )),
    }
}

/// Known fields with the one kind of value that asks for nothing we lack.
fn unsupported(body: &mut Body) -> Result<(), ApiError> {
    let stateless = "left out: responses are not stored; send the whole conversation as 'input'";
    for name in ["previous_response_id", "conversation", "prompt"] {
        body.unsupported(name, &[], stateless)?;
    }
    body.unsupported(
        "background",
        &[json!(false)],
        "false: responses are not stored",
    )?;
    body.unsupported(
        "truncation",
        &[json!("disabled")],
        "'disabled': no input is cut silently",
    )?;
    body.unsupported("max_tool_calls", &[], "left out: the server calls no tools")?;
    if let Some(options) = body.take("stream_options") {
        let mut options = Body::inner("stream_options", options)?;
        options.flag("include_obfuscation", false)?;
        options.finish(UnknownFields::Reject)?;
    }
    Ok(())
}

/// What `text.format` asks for.
fn text(body: &mut Body) -> Result<Option<Given>, ApiError> {
    let Some(text) = body.take("text") else {
        return Ok(None);
    };
    let mut text = Body::inner("text", text)?;
    text.take("verbosity");
    let format = text.take("format");
    text.finish(UnknownFields::Reject)?;
    let Some(format) = format else {
        return Ok(None);
    };
    Ok(constraint::response_format("text.format", &format)?)
}

/// Takes the conversation and its tools out of a body, as the fields of a chat.
fn conversation(body: &mut Body, instructions: Option<&str>) -> Result<Body, ApiError> {
    let mut messages = Vec::new();
    if let Some(text) = instructions {
        messages.push(json!({"role": "system", "content": text}));
    }
    match body.take("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (i, item) in items.iter().enumerate() {
                convert(&format!("input[{i}]"), item, &mut messages)?;
            }
        }
        other => {
            let given = other.unwrap_or_default();
            return Err(ApiError::field(
                "input",
                "text, or a non-empty list of items",
                &given,
            ));
        }
    }
    let mut fields = Map::new();
    fields.insert("messages".to_owned(), Value::Array(messages));
    let tools = body.list("tools")?.unwrap_or_default();
    let tools = (0..).zip(&tools).map(|(i, tool)| function(i, tool));
    fields.insert(
        "tools".to_owned(),
        tools.collect::<Result<Vec<_>, _>>()?.into(),
    );
    for name in ["tool_choice", "parallel_tool_calls", "chat_template_kwargs"] {
        if let Some(value) = body.take(name) {
            fields.insert(name.to_owned(), value);
        }
    }
    if let Some(reasoning) = body.take("reasoning") {
        let mut reasoning = Body::inner("reasoning", reasoning)?;
        if let Some(effort) = reasoning.take("effort") {
            fields.insert("reasoning_effort".to_owned(), effort);
        }
        // The reasoning itself is told, which is more than a summary of it.
        reasoning.take("summary");
        reasoning.take("generate_summary");
        reasoning.finish(UnknownFields::Reject)?;
    }
    Body::inner("body", Value::Object(fields))
}

fn function(i: usize, tool: &Value) -> Result<Value, ApiError> {
    if tool["type"] != "function" || !tool["name"].is_string() {
        let allowed = "an object of type 'function' with a 'name': tools that the server runs are not supported";
        return Err(ApiError::field(&format!("tools[{i}]"), allowed, tool));
    }
    let mut function = Map::new();
    for name in ["name", "description", "parameters"] {
        if !tool[name].is_null() {
            function.insert(name.to_owned(), tool[name].clone());
        }
    }
    Ok(json!({"type": "function", "function": function}))
}

/// One item; those that a model wrote one after the other are one message.
fn convert(param: &str, item: &Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    match item["type"].as_str() {
        None | Some("message") => {
            let role = match item["role"].as_str() {
                Some("developer") => "system",
                Some(role @ ("user" | "assistant" | "system")) => role,
                _ => {
                    return Err(ApiError::field(
                        param,
                        "an item with a 'type' or a 'role'",
                        item,
                    ));
                }
            };
            let text = text_of(&format!("{param}.content"), &item["content"])?;
            if role == "assistant" {
                assistant(out)["content"] = Value::String(text);
            } else {
                out.push(json!({"role": role, "content": text}));
            }
        }
        Some("reasoning") => {
            let text = match &item["content"] {
                Value::Null => return Ok(()),
                content => text_of(&format!("{param}.content"), content)?,
            };
            out.push(json!({"role": "assistant", "content": "", "reasoning_content": text}));
        }
        Some("function_call") => {
            let call = json!({
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            });
            let message = assistant(out);
            match message["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => message["tool_calls"] = json!([call]),
            }
        }
        Some("function_call_output") => {
            let text = text_of(&format!("{param}.output"), &item["output"])?;
            out.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": text}));
        }
        Some(kind) => return Err(ApiError::unsupported_content(param, kind)),
    }
    Ok(())
}

/// The model's message at the end, begun if there is none.
fn assistant(out: &mut Vec<Value>) -> &mut Value {
    if out.last().is_none_or(|last| last["role"] != "assistant") {
        out.push(json!({"role": "assistant", "content": ""}));
    }
    let last = out.len() - 1;
    &mut out[last]
}

/// The text of a string or of text parts.
fn text_of(param: &str, value: &Value) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => {
            return Err(ApiError::field(
                param,
                "text or a list of text parts",
                other,
            ));
        }
    };
    let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("input_text" | "output_text" | "reasoning_text"), Some(text)) => Ok(text.to_owned()),
        (Some(kind), _) => Err(ApiError::unsupported_content(param, kind)),
        (None, _) => Err(ApiError::field(param, "made of parts with a 'type'", part)),
    };
    parts.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(input: &Value) -> Result<Value, ApiError> {
        let mut body = Body::parse(json!({"input": input}).to_string().as_bytes())?;
        Ok(conversation(&mut body, Some("be brief"))?
            .take("messages")
            .unwrap())
    }

    #[test]
    fn what_a_model_wrote_in_a_row_is_one_message() {
        let input = json!([
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
        ]);
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        let expected = json!([
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "I look", "reasoning_content": "hm", "tool_calls": [call("c1", "f"), call("c2", "g")]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]);
        assert_eq!(messages(&input).unwrap(), expected);
    }

    #[test]
    fn input_of_other_kinds_is_refused_by_its_place() {
        for (input, param) in [
            (json!([]), "input"),
            (json!(3), "input"),
            (
                json!([{"role": "user", "content": [{"type": "input_image"}]}]),
                "input[0].content",
            ),
            (json!([{"type": "web_search_call"}]), "input[0]"),
            (json!([{"role": "king", "content": "a"}]), "input[0]"),
        ] {
            assert_eq!(
                messages(&input).unwrap_err().param.as_deref(),
                Some(param),
                "{input}"
            );
        }
    }
}
