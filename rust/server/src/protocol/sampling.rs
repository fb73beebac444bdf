//! The fields of a body that say how tokens are drawn, and what the model makes of them.

use octavo_core::params::SamplingParams;
use octavo_grammar::constraint::Given;
use octavo_text::output::TextOptions;
use octavo_text::stop::StopSet;
use octavo_text::{TextStart, Tokenizer};
use serde_json::Value;
use std::sync::Arc;

use super::body::{Body, MAX_LIST_ENTRIES};
use crate::error::ApiError;
use crate::model::Model;

const INT_MAX: i64 = i32::MAX as i64;

/// How tokens are drawn and become text; checked, but for what depends on the prompt.
#[derive(Clone, Debug)]
pub(crate) struct Sampling {
    /// `max_tokens` is set by [`Sampling::resolve`], and so is the seed.
    params: SamplingParams,
    max_tokens: Option<u32>,
    seed: Option<i64>,
    pub(crate) truncate_prompt_tokens: Option<i64>,
    pub(crate) text: TextOptions,
    pub(crate) priority: i32,
    pub(crate) cache_salt: Option<String>,
    /// What the output must be.
    pub(crate) constraint: Option<Given>,
}

/// What the endpoint's own fields say.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted {
    /// `max_tokens` of a request that names none: the rest of the context.
    pub(crate) rest_of_context: bool,
    pub(crate) logprobs: Option<u32>,
    pub(crate) prompt_logprobs: Option<u32>,
}

impl Sampling {
    /// Takes the fields out of a body and checks them against the model.
    pub(crate) fn take(body: &mut Body, model: &Model, wanted: Wanted) -> Result<Self, ApiError> {
        let defaults = &model.info.defaults;
        let built_in = SamplingParams::default();
        let top_k = body
            .integer("top_k", -1, INT_MAX)?
            .or(defaults.top_k)
            .unwrap_or(0);
        let newer = body.integer("max_completion_tokens", 1, INT_MAX)?;
        let max_tokens = newer
            .or(body.integer("max_tokens", 1, INT_MAX)?)
            .and_then(|tokens| u32::try_from(tokens).ok());
        let max_tokens = max_tokens.or(defaults.max_new_tokens);
        let number = |body: &mut Body, name, default: Option<f32>, built_in| {
            Ok::<f32, ApiError>(body.number(name)?.or(default).unwrap_or(built_in))
        };
        let count = |body: &mut Body, name, low| {
            let found = body.integer(name, low, INT_MAX)?;
            Ok::<_, ApiError>(found.and_then(|number| u32::try_from(number).ok()))
        };
        let vocab_size = model.info.vocab_size;
        let allowed = body.token_ids("allowed_token_ids", vocab_size as usize)?;
        if allowed.as_ref().is_some_and(Vec::is_empty) {
            return Err(ApiError::field(
                "allowed_token_ids",
                "left out or not empty",
                &Value::Array(Vec::new()),
            ));
        }
        let params = SamplingParams {
            n: count(body, "n", 1)?.unwrap_or(1),
            seed: 0,
            temperature: number(
                body,
                "temperature",
                defaults.temperature,
                built_in.temperature,
            )?,
            top_k: u32::try_from(top_k).unwrap_or(0),
            top_p: number(body, "top_p", defaults.top_p, built_in.top_p)?,
            min_p: number(body, "min_p", defaults.min_p, built_in.min_p)?,
            presence_penalty: number(body, "presence_penalty", defaults.presence_penalty, 0.0)?,
            frequency_penalty: number(body, "frequency_penalty", defaults.frequency_penalty, 0.0)?,
            repetition_penalty: number(
                body,
                "repetition_penalty",
                defaults.repetition_penalty,
                1.0,
            )?,
            max_tokens: max_tokens.unwrap_or(INT_MAX as u32),
            min_tokens: count(body, "min_tokens", 0)?.unwrap_or(0),
            ignore_eos: body.flag("ignore_eos", false)?,
            stop_token_ids: body
                .token_ids("stop_token_ids", MAX_LIST_ENTRIES)?
                .unwrap_or_default(),
            eos_token_ids: model.info.eos_token_ids.clone(),
            logprobs: wanted.logprobs,
            prompt_logprobs: wanted.prompt_logprobs,
            logit_bias: logit_bias(body)?,
            bad_words: bad_words(&body.strings("bad_words")?, model)?,
            allowed_token_ids: allowed.unwrap_or_default(),
            pooling: None,
        };
        let truncate_prompt_tokens = truncation(body)?;
        let text = text_options(body, model, params.min_tokens)?;
        params.validate(vocab_size, &model.limits)?;
        let priority = priority(body)?;
        Ok(Self {
            params,
            max_tokens: max_tokens.or((!wanted.rest_of_context).then_some(built_in.max_tokens)),
            seed: body.integer("seed", i64::MIN, i64::MAX)?,
            truncate_prompt_tokens,
            text,
            priority,
            cache_salt: body.string("cache_salt")?,
            constraint: body.constraint()?,
        })
    }

    /// Choices of each prompt.
    pub(crate) fn n(&self) -> u32 {
        self.params.n
    }

    /// Whether log-probabilities were asked for.
    pub(crate) fn logprobs(&self) -> Option<u32> {
        self.params.logprobs
    }

    /// The parameters for a prompt: what is left of the context, and a seed if there is none.
    pub(crate) fn resolve(
        &self,
        prompt_len: usize,
        max_model_len: u32,
    ) -> Result<SamplingParams, ApiError> {
        let room = (max_model_len as usize).saturating_sub(prompt_len) as u32;
        if room == 0 {
            return Err(ApiError::context_length(
                "prompt",
                prompt_len,
                max_model_len,
            ));
        }
        let mut params = self.params.clone();
        params.max_tokens = self.max_tokens.map_or(room, |most| most.min(room));
        params.min_tokens = params.min_tokens.min(params.max_tokens);
        params.seed = match self.seed {
            Some(seed) => seed.cast_unsigned(),
            None => getrandom::u64().map_err(|error| ApiError::failed(error.to_string()))?,
        };
        Ok(params)
    }
}

/// Lower runs first.
pub(crate) fn priority(body: &mut Body) -> Result<i32, ApiError> {
    let priority = body.integer("priority", -INT_MAX, INT_MAX)?;
    Ok(priority
        .and_then(|one| i32::try_from(one).ok())
        .unwrap_or(0))
}

/// How many of a prompt's last tokens are kept; −1: what the context allows.
pub(crate) fn truncation(body: &mut Body) -> Result<Option<i64>, ApiError> {
    let keep = body.integer("truncate_prompt_tokens", -1, INT_MAX)?;
    if keep == Some(0) {
        return Err(ApiError::field(
            "truncate_prompt_tokens",
            "-1 or above 0",
            &Value::from(0),
        ));
    }
    Ok(keep)
}

/// Keys of a JSON object are strings; those of a bias are token ids.
fn logit_bias(body: &mut Body) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(value) = body.take("logit_bias") else {
        return Ok(Vec::new());
    };
    let Value::Object(entries) = &value else {
        return Err(ApiError::field(
            "logit_bias",
            "an object of token ids and numbers",
            &value,
        ));
    };
    body.limit_entries("logit_bias", entries.len(), MAX_LIST_ENTRIES)?;
    let mut bias = Vec::with_capacity(entries.len());
    for (token, amount) in entries {
        let is_id = token.bytes().all(|byte| byte.is_ascii_digit());
        let Some(id) = token.parse().ok().filter(|_| is_id) else {
            let token = Value::from(token.as_str());
            return Err(ApiError::field(
                "logit_bias",
                "an object whose keys are token ids",
                &token,
            ));
        };
        let Some(number) = amount.as_f64() else {
            return Err(ApiError::field(
                "logit_bias",
                "an object whose values are numbers",
                amount,
            ));
        };
        bias.push((id, number as f32));
    }
    // "1" and "01" are one token: the last one given counts, as it does for equal keys.
    bias.sort_by_key(|&(id, _)| id);
    bias.reverse();
    bias.dedup_by_key(|entry| entry.0);
    bias.reverse();
    Ok(bias)
}

/// Each bad word as it stands at the beginning of a text and after a space.
fn bad_words(words: &[String], model: &Model) -> Result<Vec<Vec<u32>>, ApiError> {
    if words.is_empty() {
        return Ok(Vec::new());
    }
    let tokenizer: &Tokenizer = model.require_tokenizer()?;
    let mut found: Vec<Vec<u32>> = Vec::new();
    for word in words {
        for form in [word.clone(), format!(" {}", word.trim_start())] {
            let ids = tokenizer.encode(&form, false, false).map_err(|error| {
                ApiError::field(
                    "bad_words",
                    format!("words ({error})"),
                    &Value::from(word.as_str()),
                )
            })?;
            if !ids.is_empty() && !found.contains(&ids) {
                found.push(ids);
            }
        }
    }
    Ok(found)
}

fn text_options(body: &mut Body, model: &Model, min_tokens: u32) -> Result<TextOptions, ApiError> {
    let stop = body.strings("stop")?;
    if model.tokenizer.is_none() && !stop.is_empty() {
        let allowed = "left out: the server runs without a tokenizer; use stop_token_ids";
        return Err(ApiError::field("stop", allowed, &Value::from(stop)));
    }
    let set = if stop.is_empty() {
        None
    } else {
        let set = StopSet::new(&stop)
            .map_err(|error| ApiError::field("stop", error.to_string(), &Value::from(stop)))?;
        Some(Arc::new(set))
    };
    Ok(TextOptions {
        stop: set,
        include_stop_str_in_output: body.flag("include_stop_str_in_output", false)?,
        min_tokens: min_tokens as usize,
        skip_special_tokens: body.flag("skip_special_tokens", true)?,
        shown_special_ids: Arc::default(),
        start: TextStart::Continuation,
    })
}
