//! `/v1/embeddings`: prompts as vectors, of the model's last hidden states.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use octavo_core::params::{Pooling, SamplingParams};
use octavo_wire::Finish;
use serde::Serialize;
use serde_json::Value;

use super::body::Body;
use super::completions::keep_last;
use super::prompts;
use super::reply::Usage;
use super::sampling::{priority, truncation};
use crate::app::{App, Tenant};
use crate::engine::{Event, NewRequest, News, Ticket, prompt_lengths};
use crate::error::ApiError;
use crate::metrics::{Clock, Metrics};
use crate::model::Model;

/// A body that has been checked whole.
struct Request {
    model_name: String,
    requests: Vec<NewRequest>,
    form: Form,
}

/// How vectors are told.
struct Form {
    /// Numbers that are kept, the first ones.
    dimensions: usize,
    normalize: bool,
    base64: bool,
}

#[derive(Serialize)]
struct Reply {
    object: &'static str,
    data: Vec<Entry>,
    model: String,
    usage: Usage,
}

#[derive(Serialize)]
struct Entry {
    object: &'static str,
    index: usize,
    embedding: Embedding,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Embedding {
    Floats(Vec<f32>),
    Base64(String),
}

pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    body: Bytes,
) -> Result<Json<impl Serialize>, ApiError> {
    let parse =
        move |bytes: &[u8], app: &App, model: &Model| Request::parse(bytes, app, model, tenant);
    let (model, request) = app.parse(body, parse).await?;
    let lengths = prompt_lengths(&request.requests);
    let mut usage = Usage::of_prompts(lengths.iter().sum());
    let ticket = app.submit(request.requests, &model).await?;
    let vectors = collect(ticket, lengths.len(), &mut usage, &app.metrics).await?;
    let entries = (0..).zip(vectors).map(|(index, vector)| Entry {
        object: "embedding",
        index,
        embedding: request.form.tell(vector),
    });
    Ok(Json(Reply {
        object: "list",
        data: entries.collect(),
        model: request.model_name,
        usage: usage.told(),
    }))
}

impl Request {
    fn parse(bytes: &[u8], app: &App, model: &Model, tenant: Tenant) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let model_name = app.model_name(body.string("model")?)?;
        let input = body.take("input");
        let prompts = prompts::parse("input", input, model.info.vocab_size)?;
        let form = Form::parse(&mut body, model.info.hidden_size as usize)?;
        let pooling = pooling(&mut body)?.unwrap_or(model.info.pooling);
        let keep = truncation(&mut body)?;
        let (priority, salt) = (priority(&mut body)?, body.string("cache_salt")?);
        body.finish(app.config.unknown_fields)?;
        let params = SamplingParams {
            temperature: 0.0,
            max_tokens: 1,
            pooling: Some(pooling),
            ..SamplingParams::default()
        };
        let requests = prompts.into_iter().map(|prompt| {
            let mut ids = prompt.into_ids("input", model)?;
            let longest = model.info.max_model_len;
            keep_last(&mut ids, keep, longest);
            if ids.len() >= longest as usize {
                return Err(ApiError::context_length("input", ids.len(), longest));
            }
            Ok(NewRequest {
                namespace: model.namespace(salt.as_deref(), ids.len() + 1),
                prompt: ids,
                params: params.clone(),
                priority,
                tenant: tenant.0,
                grammar: None,
            })
        });
        Ok(Self {
            model_name,
            requests: requests.collect::<Result<_, _>>()?,
            form,
        })
    }
}

fn pooling(body: &mut Body) -> Result<Option<Pooling>, ApiError> {
    match body.string("pooling")?.as_deref() {
        None => Ok(None),
        Some("last") => Ok(Some(Pooling::Last)),
        Some("mean") => Ok(Some(Pooling::Mean)),
        Some(other) => Err(ApiError::field("pooling", "last or mean", &other.into())),
    }
}

impl Form {
    fn parse(body: &mut Body, hidden_size: usize) -> Result<Self, ApiError> {
        let base64 = match body.string("encoding_format")?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                let given = Value::from(other);
                return Err(ApiError::field(
                    "encoding_format",
                    "float or base64",
                    &given,
                ));
            }
        };
        let dimensions = body.integer("dimensions", 1, hidden_size as i64)?;
        Ok(Self {
            dimensions: dimensions.map_or(hidden_size, |count| count as usize),
            normalize: body.flag("normalize", true)?,
            base64,
        })
    }

    /// Cut first, then scaled to length 1.
    fn tell(&self, mut vector: Vec<f32>) -> Embedding {
        vector.truncate(self.dimensions);
        let square = |x: &f32| f64::from(*x) * f64::from(*x);
        let norm = vector.iter().map(square).sum::<f64>().sqrt();
        if self.normalize && norm > 0.0 {
            for x in &mut vector {
                *x = (f64::from(*x) / norm) as f32;
            }
        }
        if self.base64 {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Embedding::Base64(base64(&bytes))
        } else {
            Embedding::Floats(vector)
        }
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let at = |i: usize| u32::from(chunk.get(i).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for place in 0..4 {
            if place <= chunk.len() {
                let digit = bits >> (18 - 6 * place) & 63;
                text.push(char::from(DIGITS[digit as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

/// Waits for the vectors of all prompts, in their order.
async fn collect(
    mut ticket: Ticket,
    count: usize,
    usage: &mut Usage,
    metrics: &Metrics,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let mut vectors: Vec<Option<Vec<f32>>> = vec![None; count];
    let mut clocks: Vec<Clock> = (0..count).map(|_| Clock::start()).collect();
    let mut unfinished = count;
    while unfinished > 0 {
        let event = ticket.events.recv().await;
        let Some(Event { place, news }) = event else {
            return Err(ApiError::failed("the request was lost"));
        };
        let place = place as usize;
        match news {
            News::Failed(error) => return Err(error),
            News::Prompt {
                num_cached_tokens, ..
            } => usage.add_cached(num_cached_tokens),
            News::Vector(vector) => vectors[place] = Some(vector),
            News::Choice(update) if update.finish == Some(Finish::Error) => {
                clocks[place].end("error", metrics);
                return Err(ApiError::failed("the model's hidden states are not finite"));
            }
            News::Choice(update) if update.finish.is_some() => {
                clocks[place].end("stop", metrics);
                unfinished -= 1;
            }
            News::Choice(_) => {}
        }
    }
    let lost = || ApiError::failed("the engine gave no vector");
    vectors
        .into_iter()
        .map(|vector| vector.ok_or_else(lost))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (text, expected) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(text.as_bytes()), expected);
        }
        assert_eq!(base64(&[0xFB, 0xFF, 0xBF]), "+/+/");
    }

    #[test]
    fn a_vector_is_cut_before_it_is_scaled() {
        let form = |fields: Value| {
            let mut body = Body::parse(fields.to_string().as_bytes()).unwrap();
            Form::parse(&mut body, 3)
        };
        let told = |fields: Value| form(fields).unwrap().tell(vec![3.0, 4.0, 12.0]);
        assert_eq!(
            told(json!({"dimensions": 2})),
            Embedding::Floats(vec![0.6, 0.8])
        );
        let raw = json!({"dimensions": 2, "normalize": false});
        assert_eq!(told(raw), Embedding::Floats(vec![3.0, 4.0]));
        let raw = json!({"normalize": false, "encoding_format": "base64", "dimensions": 1});
        assert_eq!(told(raw), Embedding::Base64("AABAQA==".to_owned()));
        for wrong in [
            json!({"dimensions": 0}),
            json!({"dimensions": 4}),
            json!({"encoding_format": "hex"}),
        ] {
            assert!(form(wrong.clone()).is_err(), "{wrong}");
        }
        let zeros = form(json!({})).unwrap().tell(vec![0.0; 3]);
        assert_eq!(zeros, Embedding::Floats(vec![0.0; 3]));
    }
}
