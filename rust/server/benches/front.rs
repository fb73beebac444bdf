//! What the front costs: requests and tokens a second with an engine that computes nothing, and the load generator on the same cores.
//!
//! `cargo bench -p octavo-server --bench front -- TOKENIZER` with a `tokenizer.json`, a folder or a `.gguf` file.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use octavo_core::params::Pooling;
use octavo_wire::{
    ChoiceUpdate, Decoder, Finish, FromEngine, ModelInfo, SamplingDefaults, ToEngine, Update,
};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

const SECONDS: u64 = 5;
const CONNECTIONS: usize = 32;
const STREAMS: usize = 256;
const STREAM_TOKENS: u32 = 1000;
const PROMPT_TOKENS: usize = 128;
/// Common words' ids in most vocabularies; any would do.
const FIRST_TOKEN: u32 = 300;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|one| one == "--stub-engine") {
        stub_engine(Path::new(&arguments[2]), Path::new(&arguments[3]));
        return;
    }
    let Some(tokenizer) = arguments[1..].iter().find(|one| !one.starts_with("--")) else {
        println!("front: no tokenizer given, nothing measured");
        return;
    };
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let config = json!({
        "host": "127.0.0.1", "port": port, "model": "stub", "served_model_name": ["stub"], "api_key": [],
        "allowed_origin": [], "tls": null, "unknown_fields": "reject", "max_body_bytes": 1 << 20, "max_queued_requests": 4096,
        "shutdown_timeout": 1.0, "engine_timeout": 30.0, "data_parallel_size": 1, "tool_call_parser": "auto", "reasoning_parser": "auto",
        "engine_command": [std::env::current_exe().unwrap(), "--stub-engine", tokenizer],
        "engine_config": {},
    });
    let config = serde_json::from_value(config).unwrap();
    std::thread::spawn(move || octavo_server::run(config).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(measure(port));
    // The stub ends with the last end of its socket.
    std::process::exit(0);
}

async fn measure(port: u16) {
    while !is_ready(port).await {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let text = "the ".repeat(PROMPT_TOKENS);
    let short = request(&json!({"prompt": text, "max_tokens": 1}));
    let latency = one_by_one(port, &short, 2000).await;
    let requests = many(port, &short).await;
    let (tokens, seconds) = streams(port).await;
    let before = cpu_seconds();
    tokio::time::sleep(Duration::from_secs(SECONDS)).await;
    let idle = (cpu_seconds() - before) / SECONDS as f64;
    let found = json!({
        "requests_per_s": requests.round(),
        "stream_tokens_per_s": (tokens as f64 / seconds).round(),
        "latency_p50_ms": latency.as_secs_f64() * 1e3,
        "idle_cpu_fraction": idle,
    });
    println!("{found:#}");
}

fn request(body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

async fn is_ready(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)).await else {
        return false;
    };
    stream
        .write_all(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    reply.starts_with("HTTP/1.1 200")
}

/// One request on a kept connection; its reply has a length.
async fn exchange(
    stream: &mut BufReader<TcpStream>,
    request: &[u8],
    line: &mut String,
    body: &mut Vec<u8>,
) {
    stream.get_mut().write_all(request).await.unwrap();
    let mut length = 0;
    loop {
        line.clear();
        stream.read_line(line).await.unwrap();
        assert!(
            !line.starts_with("HTTP/1.1 ") || line.contains("200"),
            "{line}"
        );
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
    }
    body.resize(length, 0);
    stream.read_exact(body).await.unwrap();
}

async fn connect(port: u16) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.set_nodelay(true).unwrap();
    BufReader::new(stream)
}

async fn one_by_one(port: u16, request: &[u8], count: usize) -> Duration {
    let (mut stream, mut line, mut body) = (connect(port).await, String::new(), Vec::new());
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        exchange(&mut stream, request, &mut line, &mut body).await;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    times[count / 2]
}

async fn many(port: u16, request: &[u8]) -> f64 {
    let end = Instant::now() + Duration::from_secs(SECONDS);
    let request: Arc<[u8]> = request.into();
    let mut tasks = Vec::new();
    for _ in 0..CONNECTIONS {
        let request = Arc::clone(&request);
        tasks.push(tokio::spawn(async move {
            let (mut stream, mut line, mut body) = (connect(port).await, String::new(), Vec::new());
            let mut count = 0u64;
            while Instant::now() < end {
                exchange(&mut stream, &request, &mut line, &mut body).await;
                count += 1;
            }
            count
        }));
    }
    let mut total = 0;
    for task in tasks {
        total += task.await.unwrap();
    }
    total as f64 / SECONDS as f64
}

/// Tokens that came as events, and the time they took.
async fn streams(port: u16) -> (u64, f64) {
    let request: Arc<[u8]> =
        request(&json!({"prompt": "the", "max_tokens": STREAM_TOKENS, "stream": true})).into();
    let start = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..STREAMS {
        let request = Arc::clone(&request);
        tasks.push(tokio::spawn(async move {
            let mut stream = connect(port).await;
            stream.get_mut().write_all(&request).await.unwrap();
            let (mut line, mut events) = (String::new(), 0u64);
            while !line.starts_with("data: [DONE]") {
                line.clear();
                assert!(
                    stream.read_line(&mut line).await.unwrap() > 0,
                    "the stream broke off"
                );
                events += u64::from(line.starts_with("data: {"));
            }
            events
        }));
    }
    let mut events = 0;
    for task in tasks {
        events += task.await.unwrap();
    }
    assert_eq!(
        events,
        STREAMS as u64 * u64::from(STREAM_TOKENS),
        "one event for each token"
    );
    (events, start.elapsed().as_secs_f64())
}

/// Of this process, the front among its threads.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    let ticks: f64 = fields[11..13]
        .iter()
        .map(|field| field.parse::<f64>().unwrap())
        .sum();
    ticks / 100.0
}

/// Says a token of each request in turn, as fast as the front takes them.
fn stub_engine(tokenizer: &Path, folder: &Path) {
    let mut reader = UnixStream::connect(folder.join("engine.sock")).unwrap();
    let mut writer = reader.try_clone().unwrap();
    let mut send =
        move |message: &FromEngine| writer.write_all(&octavo_wire::encode(message).unwrap());
    send(&FromEngine::Hello {
        version: octavo_wire::VERSION,
    })
    .unwrap();
    let info = ModelInfo {
        vocab_size: 2000,
        max_model_len: 4096,
        max_num_seqs: 512,
        cache_tokens: 1 << 20,
        step_seconds: 0.0,
        hidden_size: 64,
        pooling: Pooling::Last,
        max_logprobs: 20,
        eos_token_ids: Vec::new(),
        tokenizer: Some(tokenizer.display().to_string()),
        chat_template: None,
        defaults: SamplingDefaults::default(),
        long_rope_above: None,
        weight_bytes: None,
        read_bandwidth: None,
    };
    send(&FromEngine::Ready(Box::new(info))).unwrap();
    let inbox: Arc<(Mutex<Vec<ToEngine>>, std::sync::Condvar)> = Arc::default();
    let filled = Arc::clone(&inbox);
    std::thread::spawn(move || {
        let (mut decoder, mut buffer) = (Decoder::default(), vec![0; 1 << 16]);
        loop {
            match reader.read(&mut buffer) {
                Ok(0) | Err(_) => std::process::exit(0),
                Ok(count) => decoder.push(&buffer[..count]),
            }
            while let Some(message) = decoder.take::<ToEngine>().unwrap() {
                filled.0.lock().unwrap().push(message);
                filled.1.notify_one();
            }
        }
    });
    let mut running: Vec<(u64, u32, u32)> = Vec::new();
    loop {
        let mut waiting = inbox.0.lock().unwrap();
        while running.is_empty() && waiting.is_empty() {
            waiting = inbox.1.wait(waiting).unwrap();
        }
        for message in waiting.drain(..) {
            if let ToEngine::Add(add) = message {
                running.push((add.id, 0, add.params.max_tokens));
            }
        }
        drop(waiting);
        let updates = running.iter_mut().map(|(id, said, most)| {
            *said += 1;
            let ended = *said == *most;
            Update {
                id: *id,
                choices: vec![ChoiceUpdate {
                    index: 0,
                    token_ids: vec![FIRST_TOKEN + *said % 1000],
                    logprobs: Vec::new(),
                    finish: ended.then_some(Finish::Length),
                }],
                finished: ended,
                ..Update::default()
            }
        });
        let updates: Vec<Update> = updates.collect();
        if !updates.is_empty() && send(&FromEngine::Updates(updates)).is_err() {
            return;
        }
        running.retain(|(_, said, most)| said < most);
    }
}
