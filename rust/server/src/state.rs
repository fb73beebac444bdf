//! `/engine/state`: the server and its engine for people to look at, as the page at `/` draws them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use octavo_wire::EngineState;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::app::App;
use crate::error::ApiError;

/// A picture that is not older than this is shown again: many who look cost the engine what one does.
const FRESH: Duration = Duration::from_millis(250);
/// How long the engine may take to draw one.
const PATIENCE: Duration = Duration::from_millis(500);

/// What the engine showed of itself last.
#[derive(Debug, Default)]
pub(crate) struct Pictures {
    last: Mutex<Last>,
    told: Notify,
}

#[derive(Debug, Default)]
struct Last {
    asked: Option<Instant>,
    picture: Option<Arc<EngineState>>,
}

impl Pictures {
    fn lock(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine has drawn one.
    pub(crate) fn told(&self, state: EngineState) {
        self.lock().picture = Some(Arc::new(state));
        self.told.notify_waiters();
    }

    /// A picture of now, or the last one if the engine does not answer.
    async fn take(&self, ask: impl FnOnce() -> bool) -> Option<Arc<EngineState>> {
        let told = self.told.notified();
        tokio::pin!(told);
        told.as_mut().enable();
        let is_due = {
            let mut last = self.lock();
            let is_due = last.asked.is_none_or(|asked| asked.elapsed() > FRESH);
            if is_due {
                last.asked = Some(Instant::now());
            }
            is_due
        };
        if is_due && ask() {
            // What it said last is told otherwise.
            let _ = timeout(PATIENCE, told).await;
        }
        self.lock().picture.clone()
    }
}

/// Of which engine.
#[derive(Debug, Deserialize)]
pub(crate) struct Asked {
    #[serde(default)]
    engine: String,
}

pub(crate) async fn engine_state(
    State(app): State<Arc<App>>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let Query(asked) = asked.map_err(|rejection| ApiError::invalid(rejection.body_text()))?;
    let number = if asked.engine.is_empty() {
        Some(0)
    } else {
        asked.engine.parse().ok()
    };
    let Some((engine, news)) = number.and_then(|engine| Some((engine, app.engines.get(engine)?)))
    else {
        let allowed = format!("the number of an engine, below {}", app.engines.len());
        return Err(ApiError::field(
            "engine",
            allowed,
            &Value::from(asked.engine),
        ));
    };
    let picture = news.pictures.take(|| app.registry.inspect(engine)).await;
    let info = app.model().map(|model| model.info.clone());
    Ok(Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "status": app.status(),
        "model": app.config.served_model_name.first(),
        "started_at": app.started_at,
        "requests": app.registry.len(),
        "max_num_seqs": info.as_ref().map(|info| info.max_num_seqs),
        "max_model_len": info.as_ref().map(|info| info.max_model_len),
        "weight_bytes": info.as_ref().and_then(|info| info.weight_bytes),
        "read_bandwidth": info.as_ref().and_then(|info| info.read_bandwidth),
        "metrics": app.metrics.summary(engine),
        "engines": app.engines.len(),
        "engine": picture.as_deref(),
    })))
}
