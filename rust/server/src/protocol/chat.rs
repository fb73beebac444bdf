//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

use super::body::Body;
use super::choice::{Ended, Piece};
use super::collect::{Session, Step};
use super::completions::truncate;
use super::conversation::{self, Rendered};
use super::message::{AnswerFormat, Delta, Message, MessageReader};
use super::reply::{Head, Usage};
use super::sampling::{Sampling, Wanted};
use super::scores::{Scorer, TokenLogprobs};
use super::sse::{self, Events, Render, StreamOptions};
use crate::app::{App, Tenant};
use crate::engine::NewRequest;
use crate::error::ApiError;
use crate::model::Model;

/// A body that has been checked whole.
struct Request {
    head: Head,
    stream: StreamOptions,
    sampling: Sampling,
    request: NewRequest,
    answer: AnswerFormat,
    return_token_ids: bool,
}

pub(crate) async fn chat_completions(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    body: Bytes,
) -> Result<Response, ApiError> {
    let parse =
        move |bytes: &[u8], app: &App, model: &Model| Request::parse(bytes, app, model, tenant);
    let (model, request) = app.parse(body, parse).await?;
    let sampling = &request.sampling;
    let readers = (0..sampling.n())
        .map(|_| request.answer.reader())
        .collect::<Result<_, _>>()?;
    let lengths = [request.request.prompt.len()];
    let prompt = request
        .return_token_ids
        .then(|| request.request.prompt.clone());
    let ticket = app.submit(vec![request.request], &model).await?;
    let session = Session::new(
        ticket,
        model.tokenizer.as_ref(),
        &sampling.text,
        &lengths,
        sampling.n(),
        &app.metrics,
    )?;
    let chat = Chat {
        head: request.head,
        readers,
        scorer: Scorer {
            tokenizer: model.tokenizer.clone(),
            top: sampling.logprobs(),
        },
        prompt,
        include_usage: request.stream.include_usage,
        is_named: request.answer.is_named(),
    };
    if request.stream.stream {
        return Ok(sse::response(session, chat));
    }
    chat.collect(session).await
}

impl Request {
    fn parse(bytes: &[u8], app: &App, model: &Model, tenant: Tenant) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let name = app.model_name(body.string("model")?)?;
        let wanted = Wanted {
            rest_of_context: true,
            logprobs: logprobs(&mut body, model)?,
            prompt_logprobs: None,
        };
        let mut sampling = Sampling::take(&mut body, model, wanted)?;
        unsupported(&mut body)?;
        let stream = StreamOptions::take(&mut body)?;
        let return_token_ids = body.flag("return_token_ids", false)?;
        let Rendered { mut ids, answer } = conversation::render(&mut body, model)?;
        body.finish(app.config.unknown_fields)?;

        truncate(&mut ids, &sampling, model.info.max_model_len);
        sampling.text.shown_special_ids = answer.shown_special_ids(model.require_tokenizer()?)?;
        let grammar = answer.grammar(sampling.constraint.as_ref(), model)?;
        let request = app
            .new_request(ids, &sampling, grammar, model, tenant)
            .map_err(|error| error.renamed("prompt", "messages"))?;
        let object = if stream.stream {
            "chat.completion.chunk"
        } else {
            "chat.completion"
        };
        Ok(Self {
            head: Head::new("chatcmpl-", object, &name)?,
            stream,
            sampling,
            request,
            answer,
            return_token_ids,
        })
    }
}

/// How many likeliest tokens are wanted at each position, if log-probabilities are.
fn logprobs(body: &mut Body, model: &Model) -> Result<Option<u32>, ApiError> {
    let most = i64::from(model.info.max_logprobs.min(model.info.vocab_size));
    let wanted = body.flag("logprobs", false)?;
    let top = body.integer("top_logprobs", 0, most)?.map(|top| top as u32);
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(top)) => Err(ApiError::field(
            "top_logprobs",
            "left out unless 'logprobs' is true",
            &top.into(),
        )),
    }
}

/// Known fields with the one kind of value that asks for nothing we lack.
fn unsupported(body: &mut Body) -> Result<(), ApiError> {
    let text_only = "text output is all there is";
    body.unsupported(
        "modalities",
        &[json!(["text"])],
        &format!("[\"text\"]: {text_only}"),
    )?;
    body.unsupported("audio", &[], &format!("left out: {text_only}"))?;
    body.unsupported(
        "web_search_options",
        &[],
        "left out: there is no web search",
    )
}

#[derive(Debug, Default, Serialize)]
struct Logprobs {
    content: Vec<TokenLogprobs>,
    refusal: Option<()>,
}

/// What a chat's replies are made with.
struct Chat {
    head: Head,
    readers: Vec<MessageReader>,
    scorer: Scorer,
    /// To be told.
    prompt: Option<Vec<u32>>,
    include_usage: bool,
    /// The request names the function that must be called.
    is_named: bool,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    message: Message,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Reply<'a> {
    #[serde(flatten)]
    head: &'a Head,
    choices: Vec<Choice>,
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct ChunkChoice {
    index: usize,
    delta: Delta,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Chunk<'a> {
    #[serde(flatten)]
    head: &'a Head,
    choices: &'a [ChunkChoice],
    /// Absent, null, or with the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

impl Chat {
    async fn collect(mut self, mut session: Session) -> Result<Response, ApiError> {
        let mut choices: Vec<Choice> = (0..self.readers.len())
            .map(|index| Choice {
                index,
                message: Message::default(),
                logprobs: self.scorer.top.map(|_| Logprobs::default()),
                finish_reason: None,
                stop_reason: Value::Null,
                token_ids: self.prompt.as_ref().map(|_| Vec::new()),
            })
            .collect();
        while let Some(step) = session.next().await {
            match step {
                Step::Failed(error) => return Err(error),
                Step::Prompt { .. } => {}
                Step::Pieces { index, pieces } => {
                    for piece in pieces {
                        self.extend(&mut choices[index], &piece);
                    }
                }
            }
        }
        for choice in &mut choices {
            choice.message = std::mem::take(&mut choice.message).finished();
        }
        let reply = Reply {
            head: &self.head,
            choices,
            usage: session.usage.told(),
            prompt_token_ids: self.prompt,
        };
        Ok(Json(reply).into_response())
    }

    fn extend(&mut self, choice: &mut Choice, piece: &Piece) {
        let index = choice.index;
        choice.message.add(self.readers[index].push(&piece.text));
        if let (Some(told), Some(scores)) = (&mut choice.logprobs, self.scorer.scores(piece)) {
            told.content.push(scores);
        }
        if let (Some(ids), Some(token)) = (&mut choice.token_ids, piece.token) {
            ids.push(token);
        }
        if let Some(ended) = &piece.ended {
            choice.message.add(self.readers[index].finish());
            choice.finish_reason = Some(self.finish_reason(index, ended));
            choice.stop_reason = ended.stop_reason();
        }
    }

    /// A message that was cut may end inside a call; then the cut is what must be told. A call of the one function that was named is no
    /// decision of the model's: it stopped.
    fn finish_reason(&self, index: usize, ended: &Ended) -> &'static str {
        match ended.reason() {
            "stop" if self.readers[index].has_called() && !self.is_named => "tool_calls",
            reason => reason,
        }
    }

    fn push(&self, choices: &[ChunkChoice], usage: Option<Usage>, events: &mut Events) {
        events.push(&Chunk {
            head: &self.head,
            choices,
            usage: self.include_usage.then_some(usage),
            prompt_token_ids: None,
        });
    }
}

impl ChunkChoice {
    fn new(index: usize, delta: Delta) -> Self {
        Self {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: Value::Null,
            token_ids: None,
        }
    }
}

impl Render for Chat {
    /// The role, once for each choice.
    fn begin(&mut self, events: &mut Events) {
        for index in 0..self.readers.len() {
            let delta = Delta {
                role: Some("assistant"),
                content: Some(String::new()),
                ..Delta::default()
            };
            events.push(&Chunk {
                head: &self.head,
                choices: &[ChunkChoice::new(index, delta)],
                usage: self.include_usage.then_some(None),
                prompt_token_ids: self.prompt.as_deref().filter(|_| index == 0),
            });
        }
    }

    /// A chunk for each token, whether or not it has brought text yet; at the end one with the reason.
    fn step(&mut self, step: Step, events: &mut Events) {
        let Step::Pieces { index, pieces } = step else {
            return;
        };
        for piece in pieces {
            let delta = self.readers[index].push(&piece.text);
            if piece.token.is_some() {
                let mut choice = ChunkChoice::new(index, delta);
                choice.logprobs = self.scorer.scores(&piece).map(|scores| Logprobs {
                    content: vec![scores],
                    refusal: None,
                });
                if self.prompt.is_some() {
                    choice.token_ids = Some(piece.token.into_iter().collect());
                }
                self.push(&[choice], None, events);
            }
            if let Some(ended) = &piece.ended {
                let rest = self.readers[index].finish();
                let mut choice = ChunkChoice::new(index, rest);
                choice.finish_reason = Some(self.finish_reason(index, ended));
                choice.stop_reason = ended.stop_reason();
                self.push(&[choice], None, events);
            }
        }
    }

    fn end(&mut self, session: &Session, events: &mut Events) {
        if self.include_usage {
            self.push(&[], Some(session.usage.told()), events);
        }
    }
}
