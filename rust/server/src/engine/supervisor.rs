//! The life of the engine process: start, watch, restart.
//!
//! The process connects to a socket in a folder that only its owner may enter. It is dead when it exits or its stream ends, and is killed
//! when it shows no progress while work waits. Every replica has a supervisor, a process and a folder of its own.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo_wire::{Decoder, EngineState, FromEngine, ModelInfo, Progress, ToEngine, WireError};
use rustix::process::Signal;
use serde_json::json;
use thiserror::Error;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::registry::Registry;
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::log::say;

/// Starts in a row that may fail before the server gives up.
const MAX_FAILED_STARTS: u32 = 5;
/// Longest wait before another start.
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// How often an engine with work is asked how far it is.
const PING_EVERY: Duration = Duration::from_secs(1);
/// A step may take this many times as long as predicted, or as the longest one of late.
const SLOWEST_STEP: u32 = 10;
/// What is left of the longest wait with each further one: an accident of long ago is no measure.
const MEMORY: f64 = 0.98;
/// How long a process that has hung up, or was asked to end, may take to exit.
const EXIT_GRACE: Duration = Duration::from_secs(5);
/// Bytes read at once.
const READ_BYTES: usize = 1 << 16;

/// Why there is no engine, and will not be one.
#[derive(Debug, Error)]
pub enum SupervisorError {
    /// The folder, the socket or the process cannot be made.
    #[error("cannot start the engine: {0}")]
    Start(#[from] io::Error),
    /// The process ended before it was ready, again and again or for the first time.
    #[error("{0}")]
    Failed(String),
}

/// What the supervisor does when a model is there for the first time, and each time it is there again.
pub(crate) trait Listener: Send + Sync {
    /// The engine has loaded this model. An error ends its process.
    fn ready(&self, info: ModelInfo) -> impl Future<Output = Result<(), String>> + Send;
    /// The engine takes requests.
    fn connected(&self);
    /// The engine answers this about itself.
    fn progress(&self, progress: Progress);
    /// The engine shows this of itself.
    fn state(&self, state: EngineState);
    /// The engine is gone.
    fn gone(&self, death: &Death);
    /// What the engine is called in the log.
    fn name(&self) -> String;
}

/// How an engine process ended.
#[derive(Debug, Default)]
pub(crate) struct Death {
    /// It had loaded the model.
    pub(crate) was_ready: bool,
    /// It was killed from here, because nothing went on.
    pub(crate) hung: bool,
    /// Its own last words.
    pub(crate) reason: Option<String>,
    pub(crate) status: Option<ExitStatus>,
}

impl Death {
    /// Killed by somebody else or asked to end, as far as one can tell. (A hang may be the fault of a request.)
    fn is_from_outside(&self) -> bool {
        if self.status.is_some_and(|status| status.success()) {
            return true;
        }
        let signal = self.status.and_then(|status| status.signal());
        let outside = [Signal::KILL, Signal::TERM, Signal::INT, Signal::HUP];
        !self.hung
            && self.reason.is_none()
            && signal.is_some_and(|signal| outside.iter().any(|one| one.as_raw() == signal))
    }

    /// `name` is the engine's.
    fn describe(&self, name: &str) -> String {
        let how = match (&self.reason, self.status) {
            (Some(reason), _) => return reason.clone(),
            _ if self.hung => "it made no progress and was killed".to_owned(),
            (None, Some(status)) => match status.signal() {
                Some(signal) => format!("killed by signal {signal}"),
                None => format!("it exited with code {}", status.code().unwrap_or(-1)),
            },
            (None, None) => "it hung up".to_owned(),
        };
        format!("{name} ended: {how}")
    }
}

/// Keeps one engine process alive.
pub(crate) struct Supervisor<L> {
    replica: usize,
    registry: Arc<Registry>,
    listener: Arc<L>,
    command: Vec<String>,
    folder: tempfile::TempDir,
    /// Time without progress after which the engine counts as hung.
    patience: Duration,
    pings: u64,
}

impl<L: Listener> Supervisor<L> {
    /// Makes the private folder with the engine's arguments in it.
    pub(crate) fn new(
        replica: usize,
        registry: Arc<Registry>,
        listener: Arc<L>,
        config: &ServerConfig,
    ) -> Result<Self, SupervisorError> {
        let folder = tempfile::Builder::new()
            .prefix("octavo-")
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir()?;
        let arguments = json!({
            "engine": config.engine_config,
            "replica": replica,
            "num_replicas": config.data_parallel_size,
        });
        fs::write(folder.path().join("config.json"), arguments.to_string())?;
        Ok(Self {
            replica,
            registry,
            listener,
            command: config.engine_command.clone(),
            folder,
            patience: Duration::from_secs_f64(config.engine_timeout),
            pings: 0,
        })
    }

    /// Runs engines one after the other. Returns only if there can be none: the first start failed, or many in a row with no other replica
    /// that could take the requests.
    pub(crate) async fn run(mut self) -> SupervisorError {
        let (mut failures, mut was_ever_ready) = (0, false);
        loop {
            let death = match self.run_engine().await {
                Ok(death) => death,
                Err(error) => return error.into(),
            };
            was_ever_ready |= death.was_ready;
            failures = if death.was_ready { 0 } else { failures + 1 };
            let suspects = self.suspects();
            let outside = death.is_from_outside();
            let condemned = self.registry.disconnect(self.replica, &suspects, outside);
            self.listener.gone(&death);
            let told = death.describe(&self.listener.name());
            if !was_ever_ready {
                return SupervisorError::Failed(told);
            }
            if failures >= MAX_FAILED_STARTS {
                let message = format!("{told}; {failures} starts in a row have failed");
                let error = ApiError::failed(message.clone());
                if !self.registry.is_any_up() {
                    self.registry.fail_all(&error);
                    return SupervisorError::Failed(message);
                }
                self.registry.give_up(self.replica, &error);
            }
            let blame = if condemned {
                "; a request that kills it was ended"
            } else {
                ""
            };
            let waiting = self.registry.len();
            say(&format!(
                "{told}{blame}; starting it again for {waiting} unfinished requests"
            ));
            if failures > 0 {
                sleep(MAX_BACKOFF.min(Duration::from_secs(1 << failures.min(5)))).await;
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Wire ids of the requests in the steps in flight when the process died.
    fn suspects(&self) -> Vec<u64> {
        let journal = fs::read(self.path("journal")).ok();
        let journal = journal.and_then(|bytes| octavo_wire::journal::decode(&bytes));
        journal.map_or_else(Vec::new, |journal| journal.requests)
    }

    /// One process from its start to its end.
    async fn run_engine(&mut self) -> io::Result<Death> {
        let socket = self.path("engine.sock");
        for stale in [&socket, &self.path("journal")] {
            remove_if_there(stale)?;
        }
        let listener = UnixListener::bind(&socket)?;
        let mut child = self.spawn()?;
        let mut death = Death::default();
        let stream = tokio::select! {
            accepted = listener.accept() => accepted?.0,
            status = child.wait() => {
                death.status = Some(status?);
                return Ok(death);
            }
        };
        drop(listener);
        self.converse(stream, &mut child, &mut death).await;
        // An engine that is stopped, or hangs in a step, does not end by itself.
        if death.hung || timeout(EXIT_GRACE, child.wait()).await.is_err() {
            child.start_kill()?;
        }
        death.status = Some(child.wait().await?);
        Ok(death)
    }

    fn spawn(&self) -> io::Result<Child> {
        let (program, arguments) = self
            .command
            .split_first()
            .ok_or_else(|| io::Error::other("engine_command is empty"))?;
        Command::new(program)
            .args(arguments)
            .arg(self.folder.path())
            .stdin(Stdio::null())
            .kill_on_drop(true)
            // Ctrl-C at the terminal is the front's to deal with.
            .process_group(0)
            .spawn()
    }

    /// Messages to and fro until the stream or the process ends.
    async fn converse(&mut self, stream: UnixStream, child: &mut Child, death: &mut Death) {
        let (mut incoming, outgoing) = stream.into_split();
        let (sender, outbox) = mpsc::unbounded_channel();
        let writer = tokio::spawn(write(outgoing, outbox));
        let mut decoder = Decoder::default();
        let mut buffer = vec![0; READ_BYTES];
        let mut watch = Watch::new(self.patience);
        // Of its own time: messages that come meanwhile do not put the next look off.
        let mut ticks = interval(PING_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                read = incoming.read(&mut buffer) => match read {
                    Ok(0) | Err(_) => break,
                    Ok(count) => decoder.push(&buffer[..count]),
                },
                _ = ticks.tick(), if death.was_ready => {
                    if watch.is_over(self.registry.waiting_since(self.replica)) {
                        death.hung = true;
                        break;
                    }
                    self.ping(&sender);
                    continue;
                }
                // Its last messages are still in the stream.
                _ = child.wait() => {
                    drain(&mut incoming, &mut decoder).await;
                    self.take_all(&mut decoder, &sender, &mut watch, death).await;
                    break;
                }
            }
            if !self
                .take_all(&mut decoder, &sender, &mut watch, death)
                .await
            {
                break;
            }
        }
        writer.abort();
    }

    fn ping(&mut self, sender: &mpsc::UnboundedSender<ToEngine>) {
        if self.registry.waiting_since(self.replica).is_some() {
            self.pings += 1;
            // A writer that is gone shows in the stream's end.
            let _ = sender.send(ToEngine::Ping { nonce: self.pings });
        }
    }

    /// Deals with every whole message; false if the stream cannot be gone on with.
    async fn take_all(
        &self,
        decoder: &mut Decoder,
        sender: &mpsc::UnboundedSender<ToEngine>,
        watch: &mut Watch,
        death: &mut Death,
    ) -> bool {
        loop {
            match decoder.take::<FromEngine>() {
                Ok(None) => return true,
                Ok(Some(message)) => {
                    if let Err(reason) = self.take(message, sender, watch, death).await {
                        death.reason = Some(reason);
                        return false;
                    }
                }
                Err(error) => {
                    death.reason = Some(damaged(&error));
                    return false;
                }
            }
        }
    }

    async fn take(
        &self,
        message: FromEngine,
        sender: &mpsc::UnboundedSender<ToEngine>,
        watch: &mut Watch,
        death: &mut Death,
    ) -> Result<(), String> {
        match message {
            FromEngine::Hello { version } if version == octavo_wire::VERSION => {}
            FromEngine::Hello { version } => {
                return Err(format!(
                    "the engine speaks version {version} of the protocol, the front version {}",
                    octavo_wire::VERSION
                ));
            }
            FromEngine::Ready(info) => {
                watch.expect(Duration::try_from_secs_f64(info.step_seconds).unwrap_or_default());
                let cache_tokens = info.cache_tokens;
                self.listener.ready(*info).await?;
                death.was_ready = true;
                self.registry
                    .connect(self.replica, sender.clone(), cache_tokens);
                self.listener.connected();
            }
            FromEngine::Failed(reason) => death.reason = Some(reason),
            FromEngine::Updates(updates) => {
                watch.note(self.registry.waiting_since(self.replica));
                self.registry.update(self.replica, updates);
            }
            FromEngine::State(state) => self.listener.state(*state),
            FromEngine::Refused { id, message } => self.registry.refuse(id, message),
            FromEngine::Pong { progress, .. } => {
                if watch.has_advanced(progress.steps) {
                    watch.note(self.registry.waiting_since(self.replica));
                    self.registry.progressed(self.replica);
                }
                self.listener.progress(*progress);
            }
        }
        Ok(())
    }
}

/// Tells a long step from a hang: nothing goes on for longer than is usual, and than ten times what a step can take.
struct Watch {
    patience: Duration,
    /// The longest step, as predicted before any ran.
    predicted: Duration,
    /// The longest wait for progress of late.
    slowest: Duration,
    steps: u64,
}

impl Watch {
    fn new(patience: Duration) -> Self {
        Self {
            patience,
            predicted: Duration::ZERO,
            slowest: Duration::ZERO,
            steps: 0,
        }
    }

    fn expect(&mut self, predicted: Duration) {
        self.predicted = predicted;
    }

    fn has_advanced(&mut self, steps: u64) -> bool {
        std::mem::replace(&mut self.steps, steps) != steps
    }

    /// There was progress after a wait.
    fn note(&mut self, waiting_since: Option<Instant>) {
        if let Some(since) = waiting_since {
            self.slowest = self.slowest.mul_f64(MEMORY).max(since.elapsed());
        }
    }

    fn is_over(&self, waiting_since: Option<Instant>) -> bool {
        let step = self.predicted.max(self.slowest);
        let most = self.patience.max(step * SLOWEST_STEP);
        waiting_since.is_some_and(|since| since.elapsed() > most)
    }
}

async fn write(mut stream: OwnedWriteHalf, mut outbox: mpsc::UnboundedReceiver<ToEngine>) {
    while let Some(message) = outbox.recv().await {
        let frame = match octavo_wire::encode(&message) {
            Ok(frame) => frame,
            Err(error) => {
                say(&format!("a message to the engine was lost: {error}"));
                continue;
            }
        };
        if stream.write_all(&frame).await.is_err() {
            return;
        }
    }
}

/// Reads what a dead process left in the stream.
async fn drain(stream: &mut OwnedReadHalf, decoder: &mut Decoder) {
    let mut buffer = vec![0; READ_BYTES];
    while let Ok(Ok(count)) = timeout(EXIT_GRACE, stream.read(&mut buffer)).await {
        if count == 0 {
            return;
        }
        decoder.push(&buffer[..count]);
    }
}

fn damaged(error: &WireError) -> String {
    format!("the engine's messages cannot be read: {error}")
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn death(raw: i32) -> Death {
        Death {
            status: Some(ExitStatus::from_raw(raw)),
            ..Death::default()
        }
    }

    #[test]
    fn a_kill_from_outside_is_told_from_a_crash_and_from_a_hang() {
        for signal in [Signal::KILL, Signal::TERM, Signal::INT, Signal::HUP] {
            assert!(death(signal.as_raw()).is_from_outside(), "{signal:?}");
        }
        for signal in [Signal::SEGV, Signal::ABORT, Signal::BUS, Signal::FPE] {
            assert!(!death(signal.as_raw()).is_from_outside(), "{signal:?}");
        }
        assert!(death(0).is_from_outside(), "it was asked to end");
        assert!(!death(17 << 8).is_from_outside(), "it exited");
        let hung = Death {
            hung: true,
            ..death(Signal::KILL.as_raw())
        };
        assert!(!hung.is_from_outside(), "it was killed from here");
        let failed = Death {
            reason: Some("out of memory".to_owned()),
            ..death(Signal::KILL.as_raw())
        };
        assert!(!failed.is_from_outside(), "it said why");
        assert_eq!(failed.describe("it"), "out of memory");
        assert!(death(9).describe("it").contains("signal 9"));
        assert!(death(3 << 8).describe("it").contains("code 3"));
    }

    fn ago(seconds: u64) -> Option<Instant> {
        Instant::now().checked_sub(Duration::from_secs(seconds))
    }

    #[test]
    fn a_step_that_is_predicted_to_be_long_is_waited_for() {
        let mut watch = Watch::new(Duration::from_secs(5));
        watch.expect(Duration::from_secs(3));
        assert!(!watch.is_over(ago(29)), "no step was seen, and none hangs");
        assert!(watch.is_over(ago(31)));
    }

    #[test]
    fn a_pause_of_long_ago_is_forgotten() {
        let mut watch = Watch::new(Duration::from_secs(5));
        watch.note(ago(20));
        assert!(!watch.is_over(ago(100)));
        for _ in 0..200 {
            watch.note(ago(0));
        }
        assert!(watch.is_over(ago(6)));
    }

    #[test]
    fn patience_grows_with_the_slowest_step() {
        let patience = Duration::from_secs(5);
        let mut watch = Watch::new(patience);
        assert!(!watch.is_over(None));
        assert!(!watch.is_over(ago(4)));
        assert!(watch.is_over(ago(6)));
        watch.note(ago(2));
        assert!(!watch.is_over(ago(19)), "a step of two seconds was seen");
        assert!(watch.is_over(ago(25)));
    }
}
