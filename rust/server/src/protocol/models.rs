//! `/v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;

/// All names of the model; while it loads, without what only its files say.
pub(crate) async fn list_models(State(app): State<Arc<App>>) -> Json<Value> {
    let names = app.config.served_model_name.iter();
    let data: Vec<Value> = names.map(|name| describe(&app, name)).collect();
    Json(json!({"object": "list", "data": data}))
}

pub(crate) async fn show_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let name = app.model_name(Some(name))?;
    Ok(Json(describe(&app, &name)))
}

fn describe(app: &App, name: &str) -> Value {
    let info = app.model().map(|model| model.info.clone());
    json!({
        "id": name,
        "object": "model",
        "created": app.started_at,
        "owned_by": "octavo",
        "root": app.config.model,
        "max_model_len": info.as_ref().map(|info| info.max_model_len),
        "default_sampling_params": info.as_ref().map(|info| info.defaults),
    })
}
