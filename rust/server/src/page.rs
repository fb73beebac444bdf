//! The page at `/`: one document that needs nothing from anywhere else.
//!
//! Its sources lie in `page/`, one concern each, and are joined here; scripts share one scope, in the order of [`SCRIPTS`].

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

use crate::error::ApiError;
use crate::protocol::random_hex;

const DOCUMENT: &str = include_str!("../page/index.html");
const STYLES: &[&str] = &[
    include_str!("../page/base.css"),
    include_str!("../page/chat.css"),
    include_str!("../page/engine.css"),
];
const SCRIPTS: &[&str] = &[
    include_str!("../page/dom.js"),
    include_str!("../page/markdown.js"),
    include_str!("../page/api.js"),
    include_str!("../page/chat.js"),
    include_str!("../page/charts.js"),
    include_str!("../page/engine.js"),
    include_str!("../page/main.js"),
];

/// The page. It is the same for everybody: what it shows, it asks for with the visitor's key.
pub(crate) async fn page() -> Result<Response, ApiError> {
    let nonce = random_hex()?;
    // No source but this document; no markup from strings, so that no text of a model can become any.
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    );
    let policy = HeaderValue::from_str(&policy)
        .map_err(|_| ApiError::failed("the page's policy cannot be sent"))?;
    let headers = [
        (
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/html; charset=utf-8"),
        ),
        (header::CONTENT_SECURITY_POLICY, policy),
        (
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ),
        (
            header::REFERRER_POLICY,
            HeaderValue::from_static("no-referrer"),
        ),
        // A nonce is for one answer.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    Ok((headers, document(&nonce)).into_response())
}

fn document(nonce: &str) -> String {
    let element = |tag: &str, text: &str| format!("<{tag} nonce=\"{nonce}\">\n{text}</{tag}>\n");
    let styles: String = STYLES.iter().map(|text| element("style", text)).collect();
    let scripts: String = SCRIPTS.iter().map(|text| element("script", text)).collect();
    DOCUMENT
        .replace("<!-- styles -->", &styles)
        .replace("<!-- scripts -->", &scripts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_holds_all_its_parts_and_refers_to_nothing_outside() {
        let page = document("n");
        assert_eq!(page.matches("<style nonce=\"n\">").count(), STYLES.len());
        assert_eq!(page.matches("<script nonce=\"n\">").count(), SCRIPTS.len());
        for outside in [
            "src=\"http",
            "url(http",
            "@import",
            "<link rel=\"stylesheet\"",
        ] {
            assert!(!page.contains(outside), "{outside}");
        }
        for text in SCRIPTS {
            for unsafe_sink in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
            ] {
                assert!(!text.contains(unsafe_sink), "{unsafe_sink}");
            }
            assert!(!text.contains("</script"), "it would end its element");
        }
    }
}
