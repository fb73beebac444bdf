//! `/v1/completions`.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use octavo_grammar::reasoning::{self, Reasoning};
use octavo_wire::PositionLogprobs;
use serde::Serialize;
use serde_json::{Map, Value};

use super::body::Body;
use super::choice::Piece;
use super::collect::{Session, Step};
use super::prompts::{self, Prompt};
use super::reply::{self, Head, Usage};
use super::sampling::{Sampling, Wanted};
use super::sse::{self, Events, Render, StreamOptions};
use crate::app::{App, Tenant};
use crate::engine::{NewRequest, RequestGrammar, prompt_lengths};
use crate::error::ApiError;
use crate::model::Model;

/// A body that has been checked whole.
struct Request {
    head: Head,
    stream: StreamOptions,
    sampling: Sampling,
    requests: Vec<NewRequest>,
    /// One for each prompt, if they are to be repeated.
    echoes: Option<Vec<Echo>>,
    return_token_ids: bool,
}

/// A prompt that is repeated before its completions.
struct Echo {
    text: String,
    ids: Vec<u32>,
}

pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    body: Bytes,
) -> Result<Response, ApiError> {
    let parse =
        move |bytes: &[u8], app: &App, model: &Model| Request::parse(bytes, app, model, tenant);
    let (model, request) = app.parse(body, parse).await?;
    let lengths = prompt_lengths(&request.requests);
    let ticket = app.submit(request.requests, &model).await?;
    let sampling = &request.sampling;
    let session = Session::new(
        ticket,
        model.tokenizer.as_ref(),
        &sampling.text,
        &lengths,
        sampling.n(),
        &app.metrics,
    )?;
    let writer = Writer {
        head: request.head,
        n: sampling.n() as usize,
        wants_logprobs: sampling.logprobs().is_some(),
        echoes: request.echoes,
        return_token_ids: request.return_token_ids,
        model,
    };
    if request.stream.stream {
        let render = Stream {
            prompt_logprobs: vec![None; lengths.len()],
            begun: vec![false; lengths.len() * writer.n],
            include_usage: request.stream.include_usage,
            writer,
        };
        return Ok(sse::response(session, render));
    }
    collect(session, &writer, lengths.len()).await
}

impl Request {
    fn parse(bytes: &[u8], app: &App, model: &Model, tenant: Tenant) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let name = app.model_name(body.string("model")?)?;
        let max_logprobs = i64::from(model.info.max_logprobs.min(model.info.vocab_size));
        let logprobs = body
            .integer("logprobs", 0, max_logprobs)?
            .map(|top| top as u32);
        let echo = body.flag("echo", false)?;
        let wanted = Wanted {
            rest_of_context: false,
            logprobs,
            prompt_logprobs: logprobs.filter(|_| echo),
        };
        let sampling = Sampling::take(&mut body, model, wanted)?;
        let n = i64::from(sampling.n());
        if let Some(best_of) = body
            .integer("best_of", 1, i64::from(u32::MAX))?
            .filter(|&best_of| best_of != n)
        {
            let allowed = format!("equal to n ({n}): choices are not ranked");
            return Err(ApiError::field("best_of", allowed, &best_of.into()));
        }
        body.unsupported(
            "suffix",
            &[Value::from("")],
            "left out: insertion is not supported",
        )?;
        let stream = StreamOptions::take(&mut body)?;
        let return_token_ids = body.flag("return_token_ids", false)?;
        let prompts = prompts::parse("prompt", body.take("prompt"), model.info.vocab_size)?;
        body.finish(app.config.unknown_fields)?;

        let grammar = match &sampling.constraint {
            None => None,
            Some(given) => Some(RequestGrammar {
                param: given.param.clone(),
                source: Arc::new(reasoning::outputs(
                    Some(&given.constraint),
                    None,
                    Reasoning::None,
                    model.require_tokenizer()?,
                )),
            }),
        };
        let mut echoes = echo.then(Vec::new);
        let mut requests = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let text = match (&prompt, echo) {
                (Prompt::Text(text), true) => Some(text.clone()),
                _ => None,
            };
            let mut ids = prompt.into_ids("prompt", model)?;
            truncate(&mut ids, &sampling, model.info.max_model_len);
            if let Some(echoes) = &mut echoes {
                let text = match (text, &model.tokenizer) {
                    (Some(text), _) if sampling.truncate_prompt_tokens.is_none() => text,
                    (_, Some(tokenizer)) => tokenizer.decode(&ids, true),
                    (_, None) => String::new(),
                };
                echoes.push(Echo {
                    text,
                    ids: ids.clone(),
                });
            }
            requests.push(app.new_request(ids, &sampling, grammar.clone(), model, tenant)?);
        }
        Ok(Self {
            head: Head::new("cmpl-", "text_completion", &name)?,
            stream,
            sampling,
            requests,
            echoes,
            return_token_ids,
        })
    }
}

/// Keeps the last tokens of a prompt, if the request says so.
pub(crate) fn truncate(ids: &mut Vec<u32>, sampling: &Sampling, max_model_len: u32) {
    keep_last(ids, sampling.truncate_prompt_tokens, max_model_len);
}

/// Keeps so many of the last tokens; −1: what leaves room for one more.
pub(crate) fn keep_last(ids: &mut Vec<u32>, keep: Option<i64>, max_model_len: u32) {
    let keep = match keep {
        None => return,
        Some(-1) => max_model_len as usize - 1,
        Some(keep) => keep as usize,
    };
    ids.drain(..ids.len().saturating_sub(keep));
}

/// Log-probabilities in the form of this endpoint.
#[derive(Debug, Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl Logprobs {
    fn push(
        &mut self,
        model: &Model,
        token: u32,
        offset: usize,
        position: Option<&PositionLogprobs>,
    ) {
        let text = |token| reply::token_text(model.tokenizer.as_deref(), token);
        self.tokens.push(text(token));
        self.token_logprobs
            .push(position.and_then(|p| p.values.first().copied().map(f64::from)));
        self.top_logprobs.push(position.map(|position| {
            reply::entries(position)
                .map(|(id, value)| (text(id), Value::from(value)))
                .collect()
        }));
        self.text_offset.push(offset);
    }
}

/// One choice of a reply, or of a chunk.
#[derive(Debug, Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// Makes choices of pieces.
struct Writer {
    head: Head,
    n: usize,
    wants_logprobs: bool,
    echoes: Option<Vec<Echo>>,
    return_token_ids: bool,
    model: Arc<Model>,
}

impl Writer {
    /// What a choice begins with: the prompt, if it is to be repeated.
    fn begin(
        &self,
        index: usize,
        prompt_logprobs: Option<&Vec<Option<PositionLogprobs>>>,
    ) -> Choice {
        let mut choice = Choice {
            index,
            text: String::new(),
            logprobs: self.wants_logprobs.then(Logprobs::default),
            finish_reason: None,
            stop_reason: Value::Null,
            prompt_token_ids: None,
            token_ids: self.return_token_ids.then(Vec::new),
        };
        let Some(echo) = self.echo(index) else {
            return choice;
        };
        choice.text.push_str(&echo.text);
        if let Some(logprobs) = &mut choice.logprobs {
            for (place, (&token, offset)) in echo.ids.iter().zip(self.offsets(echo)).enumerate() {
                let position = prompt_logprobs.and_then(|positions| positions.get(place)?.as_ref());
                logprobs.push(&self.model, token, offset, position);
            }
        }
        if self.return_token_ids {
            choice.prompt_token_ids = Some(echo.ids.clone());
        }
        choice
    }

    fn echo(&self, index: usize) -> Option<&Echo> {
        self.echoes.as_ref().map(|echoes| &echoes[index / self.n])
    }

    /// The character of the prompt at which each token begins; a token that is not in the text has no width.
    fn offsets(&self, echo: &Echo) -> Vec<usize> {
        let Some(tokenizer) = &self.model.tokenizer else {
            return vec![0; echo.ids.len()];
        };
        let (mut rest, mut characters) = (echo.text.as_bytes(), 0);
        let mut offsets = Vec::with_capacity(echo.ids.len());
        for &id in &echo.ids {
            offsets.push(characters);
            let piece = tokenizer.token_bytes(id).unwrap_or_default();
            // SentencePiece writes a space before the first word.
            let forms = [piece, piece.strip_prefix(b" ").unwrap_or(piece)];
            if let Some(form) = forms.into_iter().find(|form| rest.starts_with(form)) {
                rest = &rest[form.len()..];
                characters += form.iter().filter(|&&byte| byte & 0xC0 != 0x80).count();
            }
        }
        offsets
    }

    fn extend(&self, choice: &mut Choice, piece: Piece) {
        choice.text.push_str(&piece.text);
        if let Some(token) = piece.token {
            if let Some(logprobs) = &mut choice.logprobs {
                let before = self
                    .echo(choice.index)
                    .map_or(0, |echo| echo.text.chars().count());
                logprobs.push(
                    &self.model,
                    token,
                    before + piece.offset,
                    piece.logprobs.as_ref(),
                );
            }
            if let Some(ids) = &mut choice.token_ids {
                ids.push(token);
            }
        }
        if let Some(ended) = piece.ended {
            choice.finish_reason = Some(ended.reason());
            choice.stop_reason = ended.stop_reason();
        }
    }
}

#[derive(Serialize)]
struct Reply<'a> {
    #[serde(flatten)]
    head: &'a Head,
    choices: Vec<Choice>,
    usage: Usage,
}

async fn collect(
    mut session: Session,
    writer: &Writer,
    num_prompts: usize,
) -> Result<Response, ApiError> {
    let mut prompt_logprobs = vec![None; num_prompts];
    let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); num_prompts * writer.n];
    while let Some(step) = session.next().await {
        match step {
            Step::Failed(error) => return Err(error),
            Step::Prompt { place, logprobs } => prompt_logprobs[place] = logprobs,
            Step::Pieces {
                index,
                pieces: more,
            } => pieces[index].extend(more),
        }
    }
    let choices = (0..).zip(pieces).map(|(index, pieces)| {
        let mut choice = writer.begin(index, prompt_logprobs[index / writer.n].as_ref());
        for piece in pieces {
            writer.extend(&mut choice, piece);
        }
        choice
    });
    let reply = Reply {
        head: &writer.head,
        choices: choices.collect(),
        usage: session.usage.told(),
    };
    Ok(Json(reply).into_response())
}

#[derive(Serialize)]
struct Chunk<'a> {
    #[serde(flatten)]
    head: &'a Head,
    choices: &'a [Choice],
    /// Absent, null, or with the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

/// A reply in events.
struct Stream {
    writer: Writer,
    prompt_logprobs: Vec<Option<Vec<Option<PositionLogprobs>>>>,
    begun: Vec<bool>,
    include_usage: bool,
}

impl Stream {
    fn push(&self, choices: &[Choice], usage: Option<Usage>, events: &mut Events) {
        events.push(&Chunk {
            head: &self.writer.head,
            choices,
            usage: self.include_usage.then_some(usage),
        });
    }
}

impl Render for Stream {
    fn begin(&mut self, _events: &mut Events) {}

    fn step(&mut self, step: Step, events: &mut Events) {
        match step {
            Step::Prompt { place, logprobs } => self.prompt_logprobs[place] = logprobs,
            Step::Pieces { index, pieces } => {
                for piece in pieces {
                    if self.writer.echoes.is_some()
                        && !std::mem::replace(&mut self.begun[index], true)
                    {
                        let place = index / self.writer.n;
                        let echo = self
                            .writer
                            .begin(index, self.prompt_logprobs[place].as_ref());
                        self.push(&[echo], None, events);
                    }
                    let mut choice = Choice {
                        index,
                        text: String::new(),
                        logprobs: self.writer.wants_logprobs.then(Logprobs::default),
                        finish_reason: None,
                        stop_reason: Value::Null,
                        prompt_token_ids: None,
                        token_ids: self.writer.return_token_ids.then(Vec::new),
                    };
                    self.writer.extend(&mut choice, piece);
                    self.push(&[choice], None, events);
                }
            }
            Step::Failed(_) => {}
        }
    }

    fn end(&mut self, session: &Session, events: &mut Events) {
        if self.include_usage {
            self.push(&[], Some(session.usage.told()), events);
        }
    }
}
