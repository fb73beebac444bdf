//! Random bodies on every route for as long as `OCTAVO_FUZZ_SECONDS` says (one second without it): no panic, no hang, no status from 500 on,
//! and every refusal in the protocol's form. The engine behind is one that says a token of each choice and ends it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::http::Request;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use octavo_core::params::Pooling;
use octavo_wire::{
    AddRequest, ChoiceUpdate, Finish, ModelInfo, PositionLogprobs, SamplingDefaults, ToEngine,
    Update,
};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use crate::app::{self, App};
use crate::auth::ApiKeys;
use crate::model::Model;

const VOCABULARY: u32 = 259;
/// No reply of this engine takes that long unless it never comes.
const HANG: Duration = Duration::from_secs(60);
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";

/// Names of fields, and words that mean something as a value.
const WORDS: &[&str] = &[
    "",
    "a",
    "model",
    "fuzzed",
    "prompt",
    "messages",
    "input",
    "instructions",
    "role",
    "content",
    "type",
    "text",
    "name",
    "user",
    "assistant",
    "system",
    "developer",
    "tool",
    "tools",
    "function",
    "function_call",
    "function_call_output",
    "tool_calls",
    "tool_call_id",
    "call_id",
    "tool_use",
    "tool_result",
    "tool_use_id",
    "input_schema",
    "parameters",
    "arguments",
    "output",
    "input_text",
    "output_text",
    "image_url",
    "refusal",
    "reasoning",
    "reasoning_content",
    "thinking",
    "budget_tokens",
    "enabled",
    "tool_choice",
    "auto",
    "none",
    "required",
    "any",
    "parallel_tool_calls",
    "response_format",
    "json_schema",
    "json_object",
    "schema",
    "stream",
    "stream_options",
    "include_usage",
    "n",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "return_token_ids",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "priority",
    "cache_salt",
    "encoding_format",
    "base64",
    "float",
    "dimensions",
    "normalize",
    "pooling",
    "mean",
    "last",
    "tokens",
    "add_special_tokens",
    "suffix",
    "id",
    "signature",
    "summary",
    "12",
    "-100",
];

/// A body of each route that is answered with 200.
fn bodies() -> Vec<(&'static str, Value)> {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    vec![
        (
            "/v1/completions",
            json!({"prompt": "a tart", "max_tokens": 3, "n": 2, "logprobs": 2, "echo": true, "stop": ["x"]}),
        ),
        (
            "/v1/completions",
            json!({"prompt": [[5, 6], [7]], "stream": true, "stream_options": {"include_usage": true}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {"role": "assistant", "content": null, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "r"}],
                "tools": [tool], "tool_choice": "none", "logprobs": true, "top_logprobs": 1, "logit_bias": {"5": -100}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "u"}], "stream": true, "n": 3, "seed": 1}),
        ),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "u"}]}], "instructions": "i", "stream": true}),
        ),
        (
            "/v1/responses",
            json!({"input": "u", "max_output_tokens": 4, "temperature": 0.5}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 5, "system": "s", "stream": true, "stop_sequences": ["x"],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]}),
        ),
        (
            "/v1/messages/count_tokens",
            json!({"messages": [{"role": "user", "content": "u"}]}),
        ),
        (
            "/v1/embeddings",
            json!({"input": ["a", [5, 6]], "encoding_format": "base64", "dimensions": 2, "pooling": "mean"}),
        ),
        (
            "/tokenize",
            json!({"prompt": "a", "return_token_strs": true}),
        ),
        ("/detokenize", json!({"tokens": [5, 6, 7]})),
    ]
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3..300_i64).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        select(WORDS).prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        Just(Value::from("é😀\u{0}".repeat(300))),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        let member =
            (select(WORDS), inner.clone()).prop_map(|(name, value)| (name.to_owned(), value));
        prop_oneof![
            prop::collection::vec(inner, 0..6).prop_map(Value::Array),
            prop::collection::vec(member, 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// Puts `new` in some place of `value`: instead of what is there, or beside it under a name that means something.
fn put(value: &mut Value, path: &[Index], new: Value, name: &str) {
    let Some((first, rest)) = path.split_first() else {
        *value = new;
        return;
    };
    match value {
        Value::Object(members)
            if members.is_empty() || (rest.is_empty() && first.index(2) == 0) =>
        {
            members.insert(name.to_owned(), new);
        }
        Value::Object(members) => {
            let place = first.index(members.len());
            if let Some((_, inner)) = members.iter_mut().nth(place) {
                put(inner, rest, new, name);
            }
        }
        Value::Array(list) if list.is_empty() || (rest.is_empty() && first.index(2) == 0) => {
            list.push(new);
        }
        Value::Array(list) => {
            let place = first.index(list.len());
            put(&mut list[place], rest, new, name);
        }
        _ => *value = new,
    }
}

/// Bytes of a body that was whole, and the route.
fn requests() -> impl Strategy<Value = (&'static str, Vec<u8>)> {
    let change = (
        prop::collection::vec(any::<Index>(), 1..5),
        values(),
        select(WORDS),
    );
    let damage = prop::collection::vec((any::<Index>(), any::<u8>()), 0..3);
    let changes = prop::collection::vec(change, 0..4);
    (
        select(bodies()),
        changes,
        prop::option::weighted(0.1, damage),
    )
        .prop_map(|((route, mut body), changes, damage)| {
            for (path, new, name) in changes {
                put(&mut body, &path, new, name);
            }
            let mut bytes = body.to_string().into_bytes();
            for (at, byte) in damage.unwrap_or_default() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            (route, bytes)
        })
}

/// A byte-level tokenizer with no merges: byte `b` is token `3 + b`, about.
fn tokenizer(folder: &std::path::Path) -> String {
    let printable = |byte: &u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..256).filter(|byte| !printable(byte)).enumerate();
    let alphabet = (0..256)
        .filter(printable)
        .chain(others.map(|(at, _)| 256 + at as u32));
    let special = ["<bos>", "<eos>", "<pad>"].map(str::to_owned);
    let spellings = special
        .iter()
        .cloned()
        .chain(alphabet.filter_map(char::from_u32).map(String::from));
    let vocab: Map<String, Value> = spellings
        .zip(0..)
        .map(|(token, id)| (token, json!(id)))
        .collect();
    let added = special.iter().zip(0..).map(|(content, id)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    let step = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let file = json!({
        "version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "normalizer": null, "pre_tokenizer": step,
        "post_processor": null, "decoder": step, "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let path = folder.join("tokenizer.json");
    std::fs::write(&path, file.to_string()).unwrap();
    path.display().to_string()
}

fn app(folder: &std::path::Path) -> Arc<App> {
    let config = json!({
        "host": "", "port": 0, "model": "fuzzed", "served_model_name": ["fuzzed"], "api_key": [], "allowed_origin": [], "tls": null,
        "unknown_fields": "warn", "max_body_bytes": 1 << 20, "max_queued_requests": 64, "shutdown_timeout": 1.0,
        "engine_timeout": 30.0, "data_parallel_size": 1, "tool_call_parser": "hermes", "reasoning_parser": "auto",
        "engine_command": [], "engine_config": {},
    });
    let app = Arc::new(App::new(
        serde_json::from_value(config).unwrap(),
        ApiKeys::default(),
    ));
    let info = ModelInfo {
        vocab_size: VOCABULARY,
        max_model_len: 512,
        max_num_seqs: 64,
        cache_tokens: 1 << 12,
        step_seconds: 0.0,
        max_logprobs: 5,
        eos_token_ids: vec![1],
        tokenizer: Some(tokenizer(folder)),
        chat_template: Some(TEMPLATE.to_owned()),
        hidden_size: 4,
        pooling: Pooling::Last,
        defaults: SamplingDefaults::default(),
        long_rope_above: None,
        weight_bytes: None,
        read_bandwidth: None,
    };
    let model = Model::load(info, &app.config).unwrap();
    app.loaded.set(Arc::new(model)).unwrap();
    app
}

fn answer(add: &AddRequest) -> Update {
    let position = |token: u32, count: Option<u32>| {
        count.map(|count| PositionLogprobs {
            ids: (0..=count).map(|at| (token + at) % VOCABULARY).collect(),
            values: vec![-1.0; count as usize + 1],
            rank: 1,
        })
    };
    let token = 3 + (add.id % 256) as u32;
    let choice = |index| ChoiceUpdate {
        index,
        token_ids: vec![token],
        logprobs: position(token, add.params.logprobs).into_iter().collect(),
        finish: Some(Finish::Length),
    };
    let scores = add.tokens.iter().enumerate();
    let scores =
        scores.map(|(at, &token)| position(token, add.params.prompt_logprobs).filter(|_| at > 0));
    Update {
        id: add.id,
        prompt_logprobs: add.params.prompt_logprobs.map(|_| scores.collect()),
        pooled: add.params.pooling.map(|_| vec![1.0, -2.0, 0.5, 0.0]),
        choices: (add.first_choice..add.first_choice + add.params.n)
            .map(choice)
            .collect(),
        finished: true,
        ..Update::default()
    }
}

#[test]
fn random_bodies_are_answered_or_refused() {
    let seconds = std::env::var("OCTAVO_FUZZ_SECONDS").map_or(1, |text| text.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let app = app(folder.path());
    let (sender, mut inbox) = mpsc::unbounded_channel();
    app.registry.connect(0, sender, 1 << 12);
    let registry = Arc::clone(&app.registry);
    runtime.spawn(async move {
        while let Some(message) = inbox.recv().await {
            if let ToEngine::Add(add) = message {
                registry.update(0, vec![answer(&add)]);
            }
        }
    });
    let service = TowerToHyperService::new(app::router(&app, None));
    let send = |route: &str, body: Vec<u8>| {
        let request = Request::post(route)
            .header("content-type", "application/json")
            .body(Body::from(body))
            .unwrap();
        let reply = async {
            let response = service.call(request).await.unwrap();
            let status = response.status().as_u16();
            (
                status,
                to_bytes(response.into_body(), usize::MAX).await.unwrap(),
            )
        };
        runtime.block_on(async { tokio::time::timeout(HANG, reply).await })
    };
    for (route, body) in bodies() {
        let (status, reply) = send(route, body.to_string().into_bytes()).unwrap();
        assert_eq!(status, 200, "{route} {body}: {reply:?}");
    }
    let (strategy, mut runner) = (requests(), TestRunner::default());
    let mut counts = std::collections::BTreeMap::<u16, u64>::new();
    while Instant::now() < end {
        let (route, body) = strategy.new_tree(&mut runner).unwrap().current();
        let shown = String::from_utf8_lossy(&body).into_owned();
        let (status, reply) =
            send(route, body).unwrap_or_else(|_| panic!("{route} hangs: {shown}"));
        assert!(status < 500, "{route} gives {status}: {shown}: {reply:?}");
        if status != 200 {
            let error: Value = serde_json::from_slice(&reply).unwrap();
            assert!(
                error["error"]["message"].is_string(),
                "{route}: {shown}: {error}"
            );
        }
        *counts.entry(status).or_default() += 1;
    }
    assert_eq!(app.registry.len(), 0, "nothing is left behind");
    assert!(
        counts.contains_key(&200) && counts.contains_key(&400),
        "{counts:?}"
    );
    eprintln!("replies by status: {counts:?}");
}
