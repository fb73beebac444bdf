//! `/v1/messages`, Anthropic's protocol: its bodies become conversations of OpenAI's form, and answers become content blocks.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::anthropic_stream::Stream;
use super::body::Body;
use super::choice::Ended;
use super::collect::{Session, Step};
use super::completions::truncate;
use super::conversation::{self, Rendered};
use super::message::{AnswerFormat, Message};
use super::reply::random_hex;
use super::sampling::{Sampling, Wanted};
use super::sse;
use crate::app::{App, Tenant};
use crate::engine::NewRequest;
use crate::error::ApiError;
use crate::model::Model;

/// A body that has been checked whole.
struct Request {
    model: String,
    stream: bool,
    sampling: Sampling,
    request: NewRequest,
    answer: AnswerFormat,
}

pub(crate) async fn messages(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    body: Bytes,
) -> Result<Response, AnthropicError> {
    Ok(answer(&app, tenant, body).await?)
}

async fn answer(app: &Arc<App>, tenant: Tenant, body: Bytes) -> Result<Response, ApiError> {
    let parse =
        move |bytes: &[u8], app: &App, model: &Model| Request::parse(bytes, app, model, tenant);
    let (model, request) = app.parse(body, parse).await?;
    let mut reader = request.answer.reader()?;
    let lengths = [request.request.prompt.len()];
    let text = &request.sampling.text;
    let ticket = app.submit(vec![request.request], &model).await?;
    let mut session = Session::new(
        ticket,
        model.tokenizer.as_ref(),
        text,
        &lengths,
        1,
        &app.metrics,
    )?;
    let id = format!("msg_{}", random_hex()?);
    if request.stream {
        return Ok(sse::response(
            session,
            Stream::new(id, request.model, reader, lengths[0]),
        ));
    }
    let mut message = Message::default();
    let mut end = None;
    while let Some(step) = session.next().await {
        match step {
            Step::Failed(error) => return Err(error),
            Step::Prompt { .. } => {}
            Step::Pieces { pieces, .. } => {
                for piece in pieces {
                    message.add(reader.push(&piece.text));
                    end = piece.ended.or(end);
                }
            }
        }
    }
    message.add(reader.finish());
    let (stop_reason, stop_sequence) = stop(end.as_ref(), reader.has_called());
    let usage = session.usage;
    let reply = json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": message.blocks(),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens(),
            "cache_read_input_tokens": usage.cached_tokens(),
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        },
    });
    Ok(Json(reply).into_response())
}

/// The tokens of a conversation, without an answer.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    body: Bytes,
) -> Result<Json<Value>, AnthropicError> {
    let count = |bytes: &[u8], app: &App, model: &Model| {
        let mut body = Body::parse(bytes)?;
        app.model_name(body.string("model")?)?;
        // Counting asks for no answer, and clients send the whole body all the same.
        for name in [
            "max_tokens",
            "stream",
            "temperature",
            "top_p",
            "top_k",
            "stop_sequences",
            "thinking",
        ] {
            body.take(name);
        }
        let mut conversation = to_openai(&mut body)?;
        body.finish(app.config.unknown_fields)?;
        let rendered = conversation::render(&mut conversation, model)?;
        Ok(json!({"input_tokens": rendered.ids.len()}))
    };
    let (_, counted) = app.parse(body, count).await?;
    Ok(Json(counted))
}

impl Request {
    fn parse(bytes: &[u8], app: &App, model: &Model, tenant: Tenant) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let name = app.model_name(body.string("model")?)?;
        if !body.has("max_tokens") {
            return Err(ApiError::field("max_tokens", "given", &Value::Null));
        }
        body.rename("stop_sequences", "stop")?;
        let mut sampling = Sampling::take(&mut body, model, Wanted::default())?;
        if sampling.n() != 1 {
            return Err(ApiError::field("n", "1", &sampling.n().into()));
        }
        let stream = body.flag("stream", false)?;
        let mut conversation = to_openai(&mut body)?;
        body.finish(app.config.unknown_fields)?;
        let Rendered { mut ids, answer } = conversation::render(&mut conversation, model)?;
        truncate(&mut ids, &sampling, model.info.max_model_len);
        sampling.text.shown_special_ids = answer.shown_special_ids(model.require_tokenizer()?)?;
        let grammar = answer.grammar(sampling.constraint.as_ref(), model)?;
        let request = app
            .new_request(ids, &sampling, grammar, model, tenant)
            .map_err(|error| error.renamed("prompt", "messages"))?;
        Ok(Self {
            model: name,
            stream,
            sampling,
            request,
            answer,
        })
    }
}

/// `stop_reason` and `stop_sequence`.
pub(super) fn stop(end: Option<&Ended>, has_called: bool) -> (&'static str, Option<String>) {
    match end {
        Some(Ended::Length) => ("max_tokens", None),
        Some(Ended::StopString(text)) => ("stop_sequence", Some(text.clone())),
        _ if has_called => ("tool_use", None),
        _ => ("end_turn", None),
    }
}

/// Takes the conversation and its tools out of a body, as the fields of a chat.
fn to_openai(body: &mut Body) -> Result<Body, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = body.take("system") {
        let text = text_of("system", &system)?;
        messages.push(json!({"role": "system", "content": text}));
    }
    for (i, message) in body
        .list("messages")?
        .unwrap_or_default()
        .into_iter()
        .enumerate()
    {
        convert(&format!("messages[{i}]"), message, &mut messages)?;
    }
    let mut fields = Map::new();
    fields.insert("messages".to_owned(), Value::Array(messages));
    let tools = body.list("tools")?.unwrap_or_default();
    let tools = (0..).zip(&tools).map(|(i, tool)| function(i, tool));
    fields.insert(
        "tools".to_owned(),
        tools.collect::<Result<Vec<_>, _>>()?.into(),
    );
    if let Some(choice) = body.take("tool_choice") {
        let kind = choice["type"].as_str().unwrap_or_default().to_owned();
        let resolved = match kind.as_str() {
            "auto" | "none" => Value::String(kind),
            "any" => "required".into(),
            "tool" => json!({"type": "function", "function": {"name": choice["name"]}}),
            _ => {
                let allowed = "of type 'auto', 'any', 'tool' or 'none'";
                return Err(ApiError::field("tool_choice", allowed, &choice));
            }
        };
        if choice["disable_parallel_tool_use"] == true {
            fields.insert("parallel_tool_calls".to_owned(), Value::Bool(false));
        }
        fields.insert("tool_choice".to_owned(), resolved);
    }
    let mut kwargs = match body.take("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(kwargs)) => kwargs,
        Some(other) => return Err(ApiError::field("chat_template_kwargs", "an object", &other)),
    };
    if let Some(thinking) = body.take("thinking") {
        let is_on = match thinking["type"].as_str() {
            Some("enabled" | "adaptive") => true,
            Some("disabled") => false,
            _ => {
                return Err(ApiError::field(
                    "thinking",
                    "of type 'enabled', 'adaptive' or 'disabled'",
                    &thinking,
                ));
            }
        };
        kwargs
            .entry("enable_thinking")
            .or_insert(Value::Bool(is_on));
    }
    fields.insert("chat_template_kwargs".to_owned(), Value::Object(kwargs));
    Body::inner("body", Value::Object(fields))
}

fn function(i: usize, tool: &Value) -> Result<Value, ApiError> {
    let param = format!("tools[{i}]");
    let is_own = tool["type"].is_null() || tool["type"] == "custom";
    if !is_own || !tool["name"].is_string() || !tool["input_schema"].is_object() {
        let allowed = "an object with a 'name' and an 'input_schema': tools that the server runs are not supported";
        return Err(ApiError::field(&param, allowed, tool));
    }
    let mut function = json!({"name": tool["name"], "parameters": tool["input_schema"]});
    if tool["description"].is_string() {
        function["description"] = tool["description"].clone();
    }
    Ok(json!({"type": "function", "function": function}))
}

/// One message as one or more of OpenAI's: results of tools are messages of their own.
fn convert(param: &str, message: Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = message["role"].as_str().unwrap_or_default().to_owned();
    if !matches!(role.as_str(), "user" | "assistant" | "system") {
        return Err(ApiError::field(
            param,
            "an object with the role 'user' or 'assistant'",
            &message,
        ));
    }
    let content = format!("{param}.content");
    let blocks = match &message["content"] {
        Value::String(text) => {
            out.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => return Err(ApiError::field(&content, "text or a list of blocks", other)),
    };
    let mut parts = Parts::default();
    for block in blocks {
        match block["type"].as_str() {
            Some("text") => parts.text.push(text_of(&content, block)?),
            Some("thinking") if role == "assistant" => {
                parts
                    .reasoning
                    .push_str(block["thinking"].as_str().unwrap_or_default());
            }
            Some("redacted_thinking") if role == "assistant" => {}
            Some("tool_use") if role == "assistant" => parts.calls.push(json!({
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": block["input"].to_string()},
            })),
            Some("tool_result") if role == "user" => {
                let result = match &block["content"] {
                    Value::Null => String::new(),
                    given => text_of(&content, given)?,
                };
                out.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}));
            }
            Some(kind) => return Err(ApiError::unsupported_content(&content, kind)),
            None => {
                return Err(ApiError::field(
                    &content,
                    "made of blocks with a 'type'",
                    block,
                ));
            }
        }
    }
    parts.push(&role, out);
    Ok(())
}

/// What the blocks of one message add up to.
#[derive(Default)]
struct Parts {
    text: Vec<String>,
    reasoning: String,
    calls: Vec<Value>,
}

impl Parts {
    fn push(self, role: &str, out: &mut Vec<Value>) {
        if self.text.is_empty() && self.calls.is_empty() && self.reasoning.is_empty() {
            return;
        }
        let mut message = json!({"role": role, "content": self.text.join("\n")});
        if !self.calls.is_empty() {
            message["tool_calls"] = Value::Array(self.calls);
        }
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = Value::String(self.reasoning);
        }
        out.push(message);
    }
}

/// The text of a string, a text block, or a list of them.
fn text_of(param: &str, value: &Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let texts = blocks.iter().map(|block| text_of(param, block));
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        block => match (block["type"].as_str(), &block["text"]) {
            (Some("text"), Value::String(text)) => Ok(text.clone()),
            (Some(kind), _) if kind != "text" => Err(ApiError::unsupported_content(param, kind)),
            _ => Err(ApiError::field(
                param,
                "text or a list of text blocks",
                block,
            )),
        },
    }
}

/// An error in this protocol's form.
pub(crate) struct AnthropicError(ApiError);

impl From<ApiError> for AnthropicError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

pub(super) fn error_body(error: &ApiError) -> Value {
    let kind = match error.status.as_u16() {
        400 => "invalid_request_error",
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}

impl IntoResponse for AnthropicError {
    fn into_response(self) -> Response {
        let body = Json(error_body(&self.0));
        let mut response = self.0.into_response();
        let replaced = body.into_response();
        response.headers_mut().extend(replaced.headers().clone());
        *response.body_mut() = replaced.into_body();
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(body: &Value) -> Result<Value, ApiError> {
        let mut conversation = to_openai(&mut Body::parse(body.to_string().as_bytes())?)?;
        Ok(conversation.take("messages").unwrap())
    }

    #[test]
    fn blocks_become_messages_and_results_of_tools_come_before_what_the_user_says() {
        let body = json!({
            "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
                    {"type": "text", "text": "and?"},
                ]},
            ],
        });
        let expected = json!([
            {"role": "system", "content": "be\nbrief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "I look", "reasoning_content": "hm",
             "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]},
            {"role": "tool", "tool_call_id": "t1", "content": "42"},
            {"role": "user", "content": "and?"},
        ]);
        assert_eq!(converted(&body).unwrap(), expected);
    }

    #[test]
    fn content_that_is_no_text_is_refused_and_never_dropped() {
        for block in [
            json!({"type": "image", "source": {}}),
            json!({"type": "document"}),
            json!({"type": "tool_use"}),
            json!({}),
        ] {
            let body = json!({"messages": [{"role": "user", "content": [block]}]});
            assert_eq!(
                converted(&body).unwrap_err().param.as_deref(),
                Some("messages[0].content"),
                "{body}"
            );
        }
    }
}
