//! From the arguments to a server that runs, and to its end.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use octavo_wire::{EngineState, ModelInfo, Progress};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::app::{self, App};
use crate::auth::{ApiKeys, MAX_KEY_BYTES};
use crate::config::ServerConfig;
use crate::engine::{Death, Listener, Supervisor, SupervisorError};
use crate::error::ApiError;
use crate::http;
use crate::log::say;
use crate::model::Model;
use crate::otlp::{Endpoint, Exporter};

/// Threads of the front at most; the rest of the machine is the model's.
const MAX_WORKERS: usize = 4;
/// How long replies that have ended may take to reach their clients.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Exit code after a second signal.
const INTERRUPTED: u8 = 130;

/// Why the server could not start or go on.
#[derive(Debug, Error)]
pub enum ServeError {
    /// An argument that the command line let through.
    #[error("{0}")]
    Config(String),
    /// The address cannot be had.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// Host and port.
        address: String,
        /// Why.
        error: io::Error,
    },
    /// The system refuses threads, signals or sockets.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// There is no engine, and will not be one.
    #[error(transparent)]
    Engine(#[from] SupervisorError),
}

/// Serves until a signal ends it; returns the exit code. Takes over SIGTERM, SIGINT and SIGHUP of the process.
///
/// # Errors
/// It could not start, or the engine cannot be kept alive.
pub fn run(config: ServerConfig) -> Result<u8, ServeError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.clamp(1, MAX_WORKERS))
        .thread_name("octavo-front")
        .enable_all()
        .build()?;
    let result = runtime.block_on(serve(config));
    // A tokenization that still runs is nobody's any more.
    runtime.shutdown_background();
    result
}

async fn serve(config: ServerConfig) -> Result<u8, ServeError> {
    let keys = ApiKeys::new(&config.api_key).ok_or_else(|| {
        ServeError::Config(format!(
            "api_key must be from 1 to {MAX_KEY_BYTES} bytes long"
        ))
    })?;
    let mut signals = Signals::new()?;
    let address = format!("{}:{}", config.host, config.port);
    let listener = TcpListener::bind((config.host.as_str(), config.port))
        .await
        .map_err(|error| ServeError::Listen { address, error })?;
    let tls = match &config.tls {
        None => None,
        Some((certificate, key)) => {
            let acceptor = http::tls(certificate, key)
                .map_err(|error| ServeError::Config(format!("TLS cannot be had: {error}")))?;
            Some(acceptor)
        }
    };
    let endpoint = config.otlp_endpoint.as_deref().map(Endpoint::parse);
    let endpoint = endpoint.transpose().map_err(ServeError::Config)?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    say(&format!(
        "listening at {scheme}://{}",
        listener.local_addr()?
    ));

    let app = Arc::new(App::new(config, keys));
    let mut engines = JoinSet::new();
    for replica in 0..app.config.data_parallel_size {
        let watcher = Watcher {
            app: Arc::clone(&app),
            replica,
        };
        let registry = Arc::clone(&app.registry);
        let supervisor = Supervisor::new(replica, registry, Arc::new(watcher), &app.config)?;
        engines.spawn(supervisor.run());
    }
    let mut restart: JoinSet<()> = JoinSet::new();
    let (stop, stopped) = oneshot::channel::<()>();
    let router = app::router(&app, endpoint.map(Exporter::start));
    let mut http = tokio::spawn(http::serve(listener, tls, router, stopped));

    let code = loop {
        tokio::select! {
            asked = signals.next() => match asked {
                Asked::Stop => break drain(&app, &mut signals).await,
                Asked::Restart if restart.is_empty() => {
                    restart.spawn(restart_engines(Arc::clone(&app)));
                }
                Asked::Restart => say("the engines are being restarted already"),
            },
            Some(_) = restart.join_next() => {}
            Some(ended) = engines.join_next() => {
                let error = engine_error(ended);
                app.drain();
                finish(stop, &mut http).await;
                return Err(error);
            }
        }
    };
    finish(stop, &mut http).await;
    // Their processes are killed with them.
    engines.shutdown().await;
    Ok(code)
}

/// Replaces one engine process after the other; while one starts, the others take its requests.
async fn restart_engines(app: Arc<App>) {
    for (replica, engine) in app.engines.iter().enumerate() {
        say(&format!(
            "restarting {}, as a signal asks",
            app.engine_name(replica)
        ));
        let mut starts = engine.starts.subscribe();
        starts.mark_unchanged();
        app.registry.stop_engine(replica);
        if starts.changed().await.is_err() {
            return;
        }
    }
}

fn engine_error(ended: Result<SupervisorError, JoinError>) -> ServeError {
    match ended {
        Ok(error) => error.into(),
        Err(error) => ServeError::Config(format!("the supervisor failed: {error}")),
    }
}

/// Lets running requests finish for a while; then ends them. Returns the exit code.
async fn drain(app: &App, signals: &mut Signals) -> u8 {
    app.drain();
    let limit = Duration::from_secs_f64(app.config.shutdown_timeout);
    let waiting = app.registry.len();
    if waiting > 0 {
        say(&format!(
            "shutting down: {waiting} requests have {} s to finish; again to stop at once",
            limit.as_secs_f64()
        ));
    }
    let code = tokio::select! {
        () = emptied(app) => 0,
        () = sleep(limit) => 0,
        () = signals.stop() => INTERRUPTED,
    };
    let error = ApiError::unavailable("the server is shutting down", "shutting_down");
    app.registry.fail_all(&error);
    code
}

/// Returns once no request is left.
async fn emptied(app: &App) {
    loop {
        let notified = app.registry.emptied.notified();
        tokio::pin!(notified);
        notified.as_mut().enable();
        if app.registry.len() == 0 {
            return;
        }
        notified.await;
    }
}

/// Lets replies reach their clients, and closes idle connections.
async fn finish(stop: oneshot::Sender<()>, http: &mut JoinHandle<()>) {
    let _ = stop.send(());
    if timeout(FLUSH_TIMEOUT, &mut *http).await.is_err() {
        http.abort();
    }
}

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP: a new engine process, with no request lost.
    Restart,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Asked {
        let (received, asked) = tokio::select! {
            one = self.terminate.recv() => (one, Asked::Stop),
            one = self.interrupt.recv() => (one, Asked::Stop),
            one = self.hangup.recv() => (one, Asked::Restart),
        };
        if received.is_none() {
            pending::<()>().await;
        }
        asked
    }

    /// Returns once the end is asked for.
    async fn stop(&mut self) {
        while self.next().await != Asked::Stop {}
    }
}

/// Tells the app of one engine's life.
struct Watcher {
    app: Arc<App>,
    replica: usize,
}

impl Listener for Watcher {
    async fn ready(&self, info: ModelInfo) -> Result<(), String> {
        let load = async || {
            let (app, info) = (Arc::clone(&self.app), info.clone());
            let loading = tokio::task::spawn_blocking(move || Model::load(info, &app.config));
            loading
                .await
                .map_err(|error| error.to_string())?
                .map(Arc::new)
        };
        let model = self.app.loaded.get_or_try_init(load).await?;
        model.is_served_by(&info)
    }

    fn connected(&self) {
        let is_first = *self.app.engines[self.replica].starts.borrow() == 0;
        self.app.engine_up(self.replica);
        let name = self.app.engine_name(self.replica);
        match (is_first, self.app.engines.len()) {
            (true, 1) => say("ready"),
            (true, _) => say(&format!("ready: {name}")),
            (false, _) => say(&format!("{name} is ready again")),
        }
    }

    fn progress(&self, progress: Progress) {
        self.app.set_progress(self.replica, &progress);
    }

    fn state(&self, state: EngineState) {
        self.app.engines[self.replica].pictures.told(state);
    }

    fn gone(&self, _death: &Death) {
        self.app.metrics.engine_gone(self.replica);
    }

    fn name(&self) -> String {
        self.app.engine_name(self.replica)
    }
}
