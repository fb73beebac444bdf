//! `/tokenize` and `/detokenize`, in vLLM's form.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use serde_json::{Value, json};

use super::body::Body;
use super::conversation;
use crate::app::App;
use crate::error::ApiError;
use crate::model::Model;

/// Token ids of a `prompt`, or of `messages` as the chat template writes them.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    body: Bytes,
) -> Result<Json<Value>, ApiError> {
    let (_, reply) = app.parse(body, tokens_of).await?;
    Ok(Json(reply))
}

/// The text of `tokens`.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    body: Bytes,
) -> Result<Json<Value>, ApiError> {
    let (_, reply) = app.parse(body, text_of).await?;
    Ok(Json(reply))
}

fn tokens_of(bytes: &[u8], app: &App, model: &Model) -> Result<Value, ApiError> {
    let mut body = Body::parse(bytes)?;
    app.model_name(body.string("model")?)?;
    let with_texts = body.flag("return_token_strs", false)?;
    let tokenizer = model.require_tokenizer()?;
    let tokens = match body.string("prompt")? {
        Some(text) => {
            let add_special = body.flag("add_special_tokens", true)?;
            tokenizer
                .encode(&text, add_special, true)
                .map_err(|error| {
                    ApiError::invalid(format!("prompt cannot be tokenized: {error}"))
                })?
        }
        None => conversation::render(&mut body, model)?.ids,
    };
    body.finish(app.config.unknown_fields)?;
    let texts = with_texts.then(|| {
        let texts = tokens
            .iter()
            .map(|&id| tokenizer.token_str(id).unwrap_or_default());
        texts.collect::<Vec<_>>()
    });
    Ok(json!({
        "count": tokens.len(),
        "max_model_len": model.info.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }))
}

fn text_of(bytes: &[u8], app: &App, model: &Model) -> Result<Value, ApiError> {
    let mut body = Body::parse(bytes)?;
    app.model_name(body.string("model")?)?;
    let most = app.config.max_body_bytes;
    let tokens = body
        .token_ids("tokens", most)?
        .ok_or_else(|| ApiError::field("tokens", "a list of token ids", &Value::Null))?;
    body.finish(app.config.unknown_fields)?;
    let vocab_size = model.info.vocab_size;
    if let Some(&token) = tokens.iter().find(|&&token| token >= vocab_size) {
        let allowed = format!("in the vocabulary, from 0 to {}", vocab_size - 1);
        return Err(ApiError::field("tokens", allowed, &token.into()));
    }
    let text = model.require_tokenizer()?.decode(&tokens, false);
    Ok(json!({"prompt": text}))
}
