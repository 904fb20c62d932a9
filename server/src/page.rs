//! The page at `/`: a document, its styles and its program, which are part of this one.

use axum::http::{HeaderName, header};
use axum::response::{IntoResponse as _, Response};

/// Content security policy: nothing beyond this server, no code or styles within the document, no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     img-src 'self' data: blob:; media-src 'self' data: blob:; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'";

const REFERRER_POLICY: HeaderName = HeaderName::from_static("referrer-policy");

/// Paths of the page. They need no key: the page asks for it.
pub(crate) const PATHS: [&str; 3] = ["/", "/page.css", "/page.js"];

pub(crate) async fn document() -> Response {
    part("text/html; charset=utf-8", include_str!("page/page.html"))
}

pub(crate) async fn styles() -> Response {
    part("text/css; charset=utf-8", include_str!("page/page.css"))
}

pub(crate) async fn program() -> Response {
    part("text/javascript; charset=utf-8", include_str!("page/page.js"))
}

fn part(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
        (REFERRER_POLICY, "no-referrer"),
    ];
    (headers, text).into_response()
}
