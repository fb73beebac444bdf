//! Errors as OpenAI's protocol has them: a status and `{"error": {"message", "type", "param", "code"}}`.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use octavo_core::params::ParamError;
use octavo_grammar::constraint::FieldError;
use serde_json::{Value, json};

/// Characters of a wrong value that a message shows.
const SHOWN: usize = 80;

/// Why a request is refused or has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
    /// Seconds after which it is worth trying again.
    pub(crate) retry_after: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// 400: the client can mend it.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400 for a field: `param must be <allowed>, got <value>`.
    pub(crate) fn field(param: &str, allowed: impl AsRef<str>, value: &Value) -> Self {
        let shown = shorten(&value.to_string());
        Self {
            param: Some(param.to_owned()),
            ..Self::invalid(format!(
                "{param} must be {}, got {shown}",
                one_line(allowed.as_ref())
            ))
        }
    }

    /// 400 for what the model's context has no room for.
    pub(crate) fn context_length(param: &str, num_tokens: usize, max_model_len: u32) -> Self {
        let most = max_model_len.saturating_sub(1);
        Self {
            param: Some(param.to_owned()),
            code: Some("context_length_exceeded"),
            ..Self::invalid(format!(
                "{param} must be at most {most} tokens (the context is {max_model_len}, one is for the output), \
                 got {num_tokens} tokens"
            ))
        }
    }

    /// 400 for content of a kind that the engine cannot read.
    pub(crate) fn unsupported_content(param: &str, kind: &str) -> Self {
        Self {
            param: Some(param.to_owned()),
            code: Some("unsupported_content"),
            ..Self::invalid(format!(
                "{param} must be made of text parts: this engine reads text only, got {kind:?}"
            ))
        }
    }

    /// 404 for a model that is not served here.
    pub(crate) fn unknown_model(name: &str, served: &[String]) -> Self {
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                format!(
                    "model {:?} does not exist; served here: {}",
                    shorten(name),
                    served.join(", ")
                ),
            )
        }
    }

    /// 404 for a path.
    pub(crate) fn unknown_route(method: &str, path: &str) -> Self {
        Self {
            code: Some("unknown_url"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                format!("there is no {method} {}", shorten(path)),
            )
        }
    }

    /// 405: the path has other methods.
    pub(crate) fn wrong_method(method: &str, path: &str) -> Self {
        Self {
            code: Some("method_not_allowed"),
            ..Self::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("{} does not answer {method}", shorten(path)),
            )
        }
    }

    /// 401.
    pub(crate) fn unauthorized() -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(
                StatusCode::UNAUTHORIZED,
                "a valid API key is needed: send the header Authorization: Bearer <key>",
            )
        }
    }

    /// 413.
    pub(crate) fn too_large(limit: usize) -> Self {
        Self {
            code: Some("request_too_large"),
            ..Self::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the body must be at most {limit} bytes"),
            )
        }
    }

    /// 408: the body did not come.
    pub(crate) fn too_slow(limit: Duration) -> Self {
        Self {
            code: Some("request_timeout"),
            ..Self::new(
                StatusCode::REQUEST_TIMEOUT,
                format!("the body must arrive within {} s", limit.as_secs()),
            )
        }
    }

    /// 429: the queue is full.
    pub(crate) fn queue_full(limit: usize) -> Self {
        Self::busy(format!(
            "{limit} requests run or wait, which is as many as this server takes"
        ))
    }

    /// 429: too much of something waits.
    pub(crate) fn busy(message: String) -> Self {
        Self {
            code: Some("queue_full"),
            retry_after: Some(1),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
        }
    }

    /// 503: not now.
    pub(crate) fn unavailable(message: &str, code: &'static str) -> Self {
        Self {
            code: Some(code),
            retry_after: Some(1),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    }

    /// 500: no fault of the client's.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// With another name for the field, as its endpoint calls it.
    pub(crate) fn renamed(mut self, from: &str, to: &str) -> Self {
        if self.param.as_deref() == Some(from) {
            self.param = Some(to.to_owned());
            self.message = self.message.replacen(from, to, 1);
        }
        self
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body.
    pub(crate) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            let headers = response.headers_mut();
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let headers = response.headers_mut();
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        Self::field(&error.param, error.allowed, &error.value)
    }
}

impl From<ParamError> for ApiError {
    fn from(error: ParamError) -> Self {
        Self {
            param: Some(error.param().to_owned()),
            ..Self::invalid(error.to_string())
        }
    }
}

/// A text of one line, cut if it is long.
pub(crate) fn shorten(text: &str) -> String {
    let text = one_line(text);
    if text.chars().count() <= SHOWN {
        return text;
    }
    let mut cut: String = text.chars().take(SHOWN - 3).collect();
    cut.push_str("...");
    cut
}

fn one_line(text: &str) -> String {
    text.split(['\n', '\r']).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_field_and_shows_a_long_value_in_short() {
        let error = ApiError::field("n", "from 1 to 4", &json!("x".repeat(500)));
        assert!(
            error
                .message
                .starts_with("n must be from 1 to 4, got \"xxx")
        );
        assert!(error.message.len() < 120, "{}", error.message);
        let body = error.body();
        assert_eq!(body["error"]["param"], "n");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert_eq!(body["error"]["code"], Value::Null);
    }

    #[test]
    fn what_a_full_queue_says_tells_when_to_come_again() {
        let response = ApiError::queue_full(8).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }
}
