#![allow(clippy::unwrap_used)]

use serde_json::Value;

use super::*;

fn table() -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/vectors/sampling_params.json"
    );
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// `None` when the engine's types cannot even hold the value: the glue refuses it.
fn int(value: &Value) -> Option<u32> {
    u32::try_from(value.as_i64()?).ok()
}

fn float(value: &Value) -> f32 {
    match value {
        Value::String(text) => text.parse().unwrap(),
        number => number.as_f64().unwrap() as f32,
    }
}

/// A list, or `{"repeat": [entry, count]}`.
fn list(value: &Value) -> Vec<Value> {
    match value.get("repeat") {
        Some(repeat) => vec![repeat[0].clone(); repeat[1].as_u64().unwrap() as usize],
        None => value.as_array().unwrap().clone(),
    }
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    list(value).iter().map(int).collect()
}

/// A map, or `{"range": [count, value]}`.
fn bias(value: &Value) -> Option<Vec<(u32, f32)>> {
    if let Some(range) = value.get("range") {
        return Some(
            (0..int(&range[0])?)
                .map(|token| (token, float(&range[1])))
                .collect(),
        );
    }
    value
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, value)| Some((token.parse().ok()?, float(value))))
        .collect()
}

fn set(params: &mut SamplingParams, name: &str, value: &Value) -> Option<()> {
    match name {
        "n" => params.n = int(value)?,
        "seed" => params.seed = value.as_i64()?.cast_unsigned(),
        "temperature" => params.temperature = float(value),
        "top_k" => {
            params.top_k = if value == &Value::from(-1) {
                0
            } else {
                int(value)?
            }
        }
        "top_p" => params.top_p = float(value),
        "min_p" => params.min_p = float(value),
        "presence_penalty" => params.presence_penalty = float(value),
        "frequency_penalty" => params.frequency_penalty = float(value),
        "repetition_penalty" => params.repetition_penalty = float(value),
        "max_tokens" => params.max_tokens = int(value)?,
        "min_tokens" => params.min_tokens = int(value)?,
        "ignore_eos" => params.ignore_eos = value.as_bool().unwrap(),
        "logprobs" => params.logprobs = Some(int(value)?),
        "prompt_logprobs" => params.prompt_logprobs = Some(int(value)?),
        "stop_token_ids" => params.stop_token_ids = ids(value)?,
        "allowed_token_ids" => params.allowed_token_ids = ids(value)?,
        "logit_bias" => params.logit_bias = bias(value)?,
        other => panic!("the table has an unknown parameter {other}"),
    }
    Some(())
}

/// The parameters of one case; `None` if the engine's types cannot hold them.
fn params(case: &Value) -> Option<SamplingParams> {
    let mut params = SamplingParams::default();
    for (name, value) in case["params"].as_object().unwrap() {
        set(&mut params, name, value)?;
    }
    if let Some(words) = case.get("bad_word_ids") {
        params.bad_words = list(words).iter().map(|word| ids(word).unwrap()).collect();
    }
    if let Some(eos) = case.get("eos_token_ids") {
        params.eos_token_ids = ids(eos).unwrap();
    }
    Some(params)
}

#[test]
fn every_edge_value_of_the_shared_table_is_granted_or_refused_by_its_name() {
    let table = table();
    let cases = table["cases"].as_array().unwrap();
    assert!(cases.len() > 150);
    for case in cases {
        let own = |name: &str| int(case.get(name).unwrap_or(&table[name])).unwrap();
        let limits = Limits {
            max_logprobs: own("max_logprobs"),
            ..Limits::default()
        };
        let wanted = case["error"].as_str();
        match params(case) {
            Some(params) => {
                let got = params.validate(own("vocab_size"), &limits);
                assert_eq!(
                    got.as_ref().err().map(ParamError::param),
                    wanted,
                    "{case}: {got:?}"
                );
            }
            None => assert!(wanted.is_some(), "{case} does not fit the engine's types"),
        }
    }
}

#[test]
fn messages_name_the_parameter_the_range_and_the_value() {
    let message = |params: SamplingParams| {
        params
            .validate(100, &Limits::default())
            .unwrap_err()
            .to_string()
    };
    let default = SamplingParams::default;
    assert_eq!(
        message(SamplingParams {
            temperature: -0.1,
            ..default()
        }),
        "temperature must be from 0 to 1000000, got -0.1"
    );
    assert_eq!(
        message(SamplingParams {
            top_p: 0.0,
            ..default()
        }),
        "top_p must be above 0 and at most 1, got 0"
    );
    assert_eq!(
        message(SamplingParams {
            min_p: f32::NAN,
            ..default()
        }),
        "min_p must be from 0 to 1, got NaN"
    );
    assert_eq!(
        message(SamplingParams {
            stop_token_ids: vec![3, 100],
            ..default()
        }),
        "stop_token_ids must be token ids below 100, the size of the vocabulary, got 100"
    );
    assert_eq!(
        message(SamplingParams {
            min_tokens: 17,
            ..default()
        }),
        "min_tokens must be at most max_tokens (16), got 17"
    );
}

#[test]
fn temperatures_below_the_epsilon_are_greedy() {
    for (temperature, greedy) in [
        (0.0, true),
        (1e-8, true),
        (0.99e-5, true),
        (1e-5, false),
        (1e-4, false),
        (1.0, false),
    ] {
        assert_eq!(
            SamplingParams {
                temperature,
                ..SamplingParams::default()
            }
            .is_greedy(),
            greedy,
            "{temperature}"
        );
    }
}
