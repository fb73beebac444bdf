//! The engine's end of the wire: requests in from the front, updates out to it.
//!
//! Two threads: one reads messages, one waits for news of the requests and writes them. When the front is gone, so is the process.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use octavo_core::ids::{Namespace, RequestId, TenantId};
use octavo_text::output::TextOptions;
use octavo_wire::{
    AddRequest, ChoiceUpdate, Decoder, FromEngine, ModelInfo, PositionLogprobs, Progress, ToEngine,
};

use crate::engine::{Engine, Submission};
use crate::mailbox::Mailbox;
use crate::update::{self, Finish, Update};

/// How long the loop has to end once the front is gone.
const GRACE: Duration = Duration::from_secs(5);
/// How often the writer looks whether the engine has ended.
const LATENCY: Duration = Duration::from_millis(500);

/// A connection to the front.
#[derive(Debug)]
pub struct Link {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    writer: Mutex<UnixStream>,
    mailbox: Arc<Mailbox>,
    engine: OnceLock<Arc<Engine>>,
}

impl Link {
    /// Connects to a front's socket and greets it. From now on the process ends when the front does.
    ///
    /// # Errors
    /// There is no front at the socket.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        let reader = stream.try_clone()?;
        let shared = Arc::new(Shared {
            writer: Mutex::new(stream),
            mailbox: Arc::default(),
            engine: OnceLock::new(),
        });
        shared.send(&FromEngine::Hello {
            version: octavo_wire::VERSION,
        })?;
        let reading = Arc::clone(&shared);
        thread::Builder::new()
            .name("octavo-link-in".to_owned())
            .spawn(move || {
                read(reader, &reading);
                reading.end();
            })?;
        Ok(Self { shared })
    }

    /// Takes requests for `engine` from now on. To be called once.
    ///
    /// # Errors
    /// The front is gone.
    pub fn serve(&self, engine: Arc<Engine>, info: ModelInfo) -> io::Result<()> {
        let preparing = Arc::clone(&engine);
        thread::Builder::new()
            .name("octavo-grammar".to_owned())
            .spawn(move || preparing.prepare_grammars())?;
        let shared = Arc::clone(&self.shared);
        // Before the front can send a request for it.
        if shared.engine.set(Arc::clone(&engine)).is_err() {
            return Err(io::Error::other("the link serves an engine already"));
        }
        shared.send(&FromEngine::Ready(Box::new(info)))?;
        thread::Builder::new()
            .name("octavo-link-out".to_owned())
            .spawn(move || shared.write_updates(&engine))?;
        Ok(())
    }

    /// Tells the front why the process is about to end.
    pub fn fail(&self, reason: &str) {
        // A front that is gone does not ask.
        let _ = self.shared.send(&FromEngine::Failed(reason.to_owned()));
    }
}

/// Deals with messages until the stream ends.
fn read(mut stream: UnixStream, shared: &Arc<Shared>) {
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => decoder.push(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
        loop {
            match decoder.take::<ToEngine>() {
                Ok(Some(ToEngine::Shutdown)) | Err(_) => return,
                Ok(Some(ToEngine::Inspect)) => inspect(shared),
                Ok(Some(message)) => shared.take(message),
                Ok(None) => break,
            }
        }
    }
}

/// Tells of the engine, on a thread of its own: requests do not wait for a picture.
fn inspect(shared: &Arc<Shared>) {
    let Some(engine) = shared.engine.get().cloned() else {
        return;
    };
    let shared = Arc::clone(shared);
    let drawing = move || {
        let _ = shared.send(&FromEngine::State(Box::new(engine.inspect())));
    };
    // Without a thread there is no picture, and the engine has greater worries.
    let _ = thread::Builder::new()
        .name("octavo-inspect".to_owned())
        .spawn(drawing);
}

impl Shared {
    fn send(&self, message: &FromEngine) -> io::Result<()> {
        let frame = octavo_wire::encode(message).map_err(io::Error::other)?;
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.write_all(&frame)
    }

    fn take(&self, message: ToEngine) {
        let engine = self.engine.get();
        match (message, engine) {
            (ToEngine::Add(request), Some(engine)) => self.add(engine, *request),
            (ToEngine::Abort { id }, Some(engine)) => engine.abort(RequestId(id)),
            (ToEngine::AbortChoice { id, choice }, Some(engine)) => {
                engine.abort_choice(RequestId(id), choice);
            }
            (ToEngine::ResetPrefixCache, Some(engine)) => engine.reset_prefix_cache(),
            (ToEngine::Ping { nonce }, engine) => {
                let progress = engine.map_or_else(Progress::default, |engine| Progress {
                    steps: engine.num_steps(),
                    stats: engine.stats(),
                });
                // If the front is gone, the reader learns it next.
                let _ = self.send(&FromEngine::Pong {
                    nonce,
                    progress: Box::new(progress),
                });
            }
            // A front sends no request before the engine is ready.
            (_, None) | (ToEngine::Shutdown | ToEngine::Inspect, _) => {}
        }
    }

    fn add(&self, engine: &Arc<Engine>, request: AddRequest) {
        let id = request.id;
        let submission = Submission {
            tokens: request.tokens,
            num_prompt_tokens: request.num_prompt_tokens,
            first_choice: request.first_choice,
            params: request.params,
            detokenize: false,
            text: TextOptions::default(),
            priority: request.priority,
            tenant: TenantId(request.tenant),
            namespace: Namespace(request.namespace),
            stream: true,
            grammar: request.grammar,
        };
        if let Err(error) = engine.add_as(RequestId(id), submission, &self.mailbox) {
            let message = error.to_string();
            let _ = self.send(&FromEngine::Refused { id, message });
        }
    }

    /// Sends what requests gain until the engine has ended.
    fn write_updates(&self, engine: &Engine) {
        while !engine.is_shut_down() {
            let updates = engine.receive(&self.mailbox, LATENCY);
            if updates.is_empty() {
                continue;
            }
            let updates = updates.into_iter().map(to_wire).collect();
            if self.send(&FromEngine::Updates(updates)).is_err() {
                break;
            }
        }
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writer.shutdown(Shutdown::Both);
    }

    /// The front is gone: nobody is left to compute for.
    fn end(&self) {
        if let Some(engine) = self.engine.get() {
            engine.shut_down();
            thread::sleep(GRACE);
        }
        // The loop hangs in a step, or the model is still being loaded.
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

fn to_wire(update: Update) -> octavo_wire::Update {
    let choices = update.choices.into_iter().map(|choice| ChoiceUpdate {
        index: choice.index,
        token_ids: choice.token_ids,
        logprobs: choice.logprobs.into_iter().map(position).collect(),
        finish: choice.finish.map(finish),
    });
    let positions = update.prompt_logprobs.map(|positions| {
        let positions = positions.into_iter();
        positions.map(|scores| scores.map(position)).collect()
    });
    octavo_wire::Update {
        id: update.id.0,
        num_cached_tokens: update.num_cached_tokens,
        prompt_logprobs: positions,
        pooled: update.pooled,
        choices: choices.collect(),
        finished: update.finished,
        error: update.error,
    }
}

fn position(scores: update::PositionLogprobs) -> PositionLogprobs {
    PositionLogprobs {
        ids: scores.ids,
        values: scores.values,
        rank: scores.rank,
    }
}

fn finish(finish: Finish) -> octavo_wire::Finish {
    match finish {
        Finish::EndOfSequence => octavo_wire::Finish::EndOfSequence,
        Finish::StopToken(token) => octavo_wire::Finish::StopToken(token),
        // Requests of the wire have no stop strings.
        Finish::StopString(_) | Finish::Abort => octavo_wire::Finish::Abort,
        Finish::Length => octavo_wire::Finish::Length,
        Finish::Error => octavo_wire::Finish::Error,
    }
}
