//! The routes, and what every handler shares.

use std::any::Any;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use octavo_wire::Progress;
use serde_json::{Value, json};
use tokio::sync::{Notify, OnceCell, watch};
use tokio::time::timeout;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any as AnyValue, CorsLayer};

use crate::auth::ApiKeys;
use crate::config::ServerConfig;
use crate::engine::{NewRequest, Registry, RequestGrammar, SubmitError, Ticket, prompt_lengths};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::model::Model;
use crate::otlp::Exporter;
use crate::page;
use crate::protocol::{self, Sampling};
use crate::state::{self, Pictures};
use crate::trace;

/// Bytes of a body up to which it is read and tokenized at once; longer ones go to a thread of their own.
const SMALL_BODY: usize = 16 << 10;

/// Time for a whole body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a scrape waits for the engine.
const PROGRESS_TIMEOUT: Duration = Duration::from_millis(500);

/// Whom fairness counts a request for: the number of the key that it came with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tenant(pub(crate) u64);

impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().copied().unwrap_or_default())
    }
}

/// What every handler shares.
pub(crate) struct App {
    pub(crate) config: ServerConfig,
    pub(crate) keys: ApiKeys,
    pub(crate) registry: Arc<Registry>,
    /// Seconds since 1970.
    pub(crate) started_at: u64,
    /// Set once the first engine has loaded it.
    pub(crate) loaded: OnceCell<Arc<Model>>,
    is_draining: AtomicBool,
    pub(crate) metrics: Arc<Metrics>,
    /// One for each engine.
    pub(crate) engines: Vec<EngineNews>,
}

/// Where one waits for an engine.
#[derive(Debug)]
pub(crate) struct EngineNews {
    /// Signalled when it has told of itself.
    progress_told: Notify,
    /// How often it has been ready.
    pub(crate) starts: watch::Sender<u64>,
    /// What it showed of itself last.
    pub(crate) pictures: Pictures,
}

impl App {
    pub(crate) fn new(config: ServerConfig, keys: ApiKeys) -> Self {
        let replicas = config.data_parallel_size;
        let news = || EngineNews {
            progress_told: Notify::new(),
            starts: watch::Sender::new(0),
            pictures: Pictures::default(),
        };
        Self {
            keys,
            registry: Arc::new(Registry::new(replicas)),
            started_at: protocol::now(),
            loaded: OnceCell::new(),
            is_draining: AtomicBool::new(false),
            metrics: Arc::new(Metrics::new(replicas)),
            engines: (0..replicas).map(|_| news()).collect(),
            config,
        }
    }

    /// The model, once it is loaded.
    pub(crate) fn model(&self) -> Option<Arc<Model>> {
        self.loaded.get().cloned()
    }

    /// The model, if requests are taken now.
    pub(crate) fn open(&self) -> Result<Arc<Model>, ApiError> {
        if self.is_draining() {
            return Err(ApiError::unavailable(
                "the server is shutting down",
                "shutting_down",
            ));
        }
        self.model()
            .ok_or_else(|| ApiError::unavailable("the model is being loaded", "model_loading"))
    }

    /// What an engine is called in the log.
    pub(crate) fn engine_name(&self, replica: usize) -> String {
        match self.engines.len() {
            1 => "the engine".to_owned(),
            _ => format!("engine {replica}"),
        }
    }

    /// An engine takes requests.
    pub(crate) fn engine_up(&self, replica: usize) {
        self.metrics.engine_up(replica);
        self.engines[replica]
            .starts
            .send_modify(|count| *count += 1);
    }

    /// New requests are refused from now on.
    pub(crate) fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// One word for people.
    pub(crate) fn status(&self) -> &'static str {
        match (self.open(), self.registry.is_any_up()) {
            (Ok(_), true) => "ready",
            (Ok(_), false) => "restarting",
            (Err(_), _) if self.is_draining() => "stopping",
            (Err(_), _) => "loading",
        }
    }

    pub(crate) fn set_progress(&self, replica: usize, progress: &Progress) {
        self.metrics.set_progress(replica, progress);
        self.engines[replica].progress_told.notify_waiters();
    }

    /// The name under which the model answers; an error if the request asks for another one.
    pub(crate) fn model_name(&self, given: Option<String>) -> Result<String, ApiError> {
        let served = &self.config.served_model_name;
        match given {
            None => Ok(served.first().cloned().unwrap_or_default()),
            Some(name) if served.contains(&name) => Ok(name),
            Some(name) => Err(ApiError::unknown_model(&name, served)),
        }
    }

    /// A request of a prompt.
    pub(crate) fn new_request(
        &self,
        prompt: Vec<u32>,
        sampling: &Sampling,
        grammar: Option<RequestGrammar>,
        model: &Model,
        tenant: Tenant,
    ) -> Result<NewRequest, ApiError> {
        let params = sampling.resolve(prompt.len(), model.info.max_model_len)?;
        if grammar.is_some() {
            params.validate_with_grammar()?;
        }
        let longest = prompt.len() + params.max_tokens as usize;
        Ok(NewRequest {
            namespace: model.namespace(sampling.cache_salt.as_deref(), longest),
            prompt,
            params,
            priority: sampling.priority,
            tenant: tenant.0,
            grammar,
        })
    }

    /// Gives requests of one body to the engine, all or none; a grammar must compile first.
    pub(crate) async fn submit(
        &self,
        requests: Vec<NewRequest>,
        model: &Model,
    ) -> Result<Ticket, ApiError> {
        if let Some(grammar) = requests.first().and_then(|new| new.grammar.as_ref()) {
            model.check_grammar(grammar).await?;
        }
        let running = model.info.max_num_seqs as usize * self.config.data_parallel_size;
        let limit = running + self.config.max_queued_requests;
        let lengths = prompt_lengths(&requests);
        if let (Some(trace), Some(first)) = (trace::current(), requests.first()) {
            trace.asked(&first.params);
        }
        let submitted = self.registry.submit(requests, limit);
        if submitted.is_ok() {
            for length in lengths {
                self.metrics.accepted(length);
            }
        }
        submitted.map_err(|error| match error {
            SubmitError::Full(limit) => ApiError::queue_full(limit),
            SubmitError::TooMany(limit) => ApiError::invalid(format!(
                "prompts times n must be at most {limit}: more sequences than this server takes at once"
            )),
        })
    }

    /// The model, and what `parse` makes of a body for it.
    pub(crate) async fn parse<T: Send + 'static>(
        self: &Arc<Self>,
        body: Bytes,
        parse: impl FnOnce(&[u8], &Self, &Model) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(Arc<Model>, T), ApiError> {
        let model = self.open()?;
        let (app, for_parsing) = (Arc::clone(self), Arc::clone(&model));
        let parsed = self
            .off_the_loop(body.len(), move || parse(&body, &app, &for_parsing))
            .await?;
        Ok((model, parsed))
    }

    /// Runs `work` on a body of `size` bytes; a large one does not stop the other connections.
    async fn off_the_loop<T: Send + 'static>(
        &self,
        size: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if size <= SMALL_BODY {
            return work();
        }
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(_) => Err(internal()),
        }
    }
}

/// All routes; generations are traced if there is somebody to tell.
pub(crate) fn router(app: &Arc<App>, exporter: Option<Exporter>) -> Router {
    let closed = Router::new()
        .route("/v1/completions", post(protocol::completions))
        .route("/v1/chat/completions", post(protocol::chat_completions))
        .route("/v1/messages", post(protocol::messages))
        .route("/v1/messages/count_tokens", post(protocol::count_tokens))
        .route("/v1/responses", post(protocol::responses))
        .route("/v1/embeddings", post(protocol::embeddings))
        .route("/metrics", get(metrics))
        .route("/engine/state", get(state::engine_state))
        .route("/openapi.json", get(openapi))
        .route("/tokenize", post(protocol::tokenize))
        .route("/detokenize", post(protocol::detokenize))
        .route("/v1/models", get(protocol::list_models))
        .route("/v1/models/{*name}", get(protocol::show_model))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(app), limit_body))
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(
            Arc::clone(app),
            authenticate,
        ));
    let public = Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/", get(page::page))
        .method_not_allowed_fallback(wrong_method);
    let routes = public.merge(closed).with_state(Arc::clone(app));
    let routes = match cors(&app.config.allowed_origin) {
        Some(layer) => routes.layer(layer),
        None => routes,
    };
    let routes = match exporter {
        Some(exporter) => {
            let shared = (Arc::clone(app), exporter);
            routes.layer(middleware::from_fn_with_state(shared, trace::layer))
        }
        None => routes,
    };
    routes
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(Arc::clone(app), count))
}

/// Outermost but one, so that refusals carry its headers and preflights need no key.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([HeaderName::from_static("retry-after")]);
    if origins.is_empty() {
        return None;
    }
    if origins.iter().any(|origin| origin == "*") {
        return Some(layer.allow_origin(AnyValue));
    }
    let origins = origins
        .iter()
        .filter_map(|origin| HeaderValue::from_str(origin).ok());
    Some(layer.allow_origin(AllowOrigin::list(origins)))
}

async fn authenticate(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    match app.keys.check(request.headers()) {
        Some(number) => {
            request.extensions_mut().insert(Tenant(number));
            next.run(request).await
        }
        None => ApiError::unauthorized().into_response(),
    }
}

/// Refuses a body that is too long, by what it says of itself or by what comes.
async fn limit_body(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let limit = app.config.max_body_bytes;
    let (parts, body) = request.into_parts();
    let announced = parts.headers.get("content-length");
    let announced = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limit) {
        return ApiError::too_large(limit).into_response();
    }
    match timeout(BODY_TIMEOUT, axum::body::to_bytes(body, limit)).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(parts, bytes.into())).await,
        Ok(Err(_)) => ApiError::too_large(limit).into_response(),
        Err(_) => ApiError::too_slow(BODY_TIMEOUT).into_response(),
    }
}

/// The server is alive, whether or not it can answer yet.
async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Requests are answered: the model is loaded and the server is not going.
async fn ready(State(app): State<Arc<App>>) -> Response {
    if let Err(error) = app.open() {
        return error.into_response();
    }
    if !app.registry.is_any_up() {
        return ApiError::unavailable("the engine is being restarted", "engine_restarting")
            .into_response();
    }
    Json(json!({"status": "ready"})).into_response()
}

/// Counts an answer under the route that it came from.
async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let handler = route.as_ref().map_or("none", MatchedPath::as_str);
    app.metrics.answered(handler, response.status().as_u16());
    response
}

/// What Prometheus reads, with what the engines say of themselves now, if they answer in time.
async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let news = app.engines.iter();
    let mut told: Vec<_> = news.map(|one| Some(one.progress_told.notified())).collect();
    let answers = async {
        for replica in app.registry.ping() {
            if let Some(told) = told[replica].take() {
                told.await;
            }
        }
    };
    // What they said last is told otherwise.
    let _ = timeout(PROGRESS_TIMEOUT, answers).await;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.text())
}

/// Every route with its fields, as OpenAPI 3.1; the tests hold it against the server.
async fn openapi() -> impl IntoResponse {
    let kind = "application/json";
    (
        [(header::CONTENT_TYPE, kind)],
        include_str!("../openapi.json"),
    )
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::unknown_route(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::wrong_method(request.method().as_str(), request.uri().path())
}

fn internal() -> ApiError {
    ApiError::failed("the server failed to answer this request; its log has more")
}

/// The panic's message is in the log, not in the reply.
fn panicked(_: Box<dyn Any + Send>) -> Response {
    let mut response = internal().into_response();
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}
