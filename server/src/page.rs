//! The page at `/`: a document, its styles and its programs, which are part of this one.

use axum::extract::Path;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse as _, Response};

use crate::error::{ApiError, Result};

/// Content security policy: nothing beyond this server, no code or styles within the document, no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     img-src 'self' data: blob:; media-src 'self' data: blob:; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'";

const REFERRER_POLICY: HeaderName = HeaderName::from_static("referrer-policy");

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";

/// Files under `/page/`. They need no key: the page asks for it.
const PARTS: [(&str, &str, &str); 11] = [
    ("page.css", CSS, include_str!("page/page.css")),
    ("theme.js", JS, include_str!("page/theme.js")),
    ("page.js", JS, include_str!("page/page.js")),
    ("dom.js", JS, include_str!("page/dom.js")),
    ("api.js", JS, include_str!("page/api.js")),
    ("store.js", JS, include_str!("page/store.js")),
    ("markdown.js", JS, include_str!("page/markdown.js")),
    ("media.js", JS, include_str!("page/media.js")),
    ("audio.js", JS, include_str!("page/audio.js")),
    ("chat.js", JS, include_str!("page/chat.js")),
    ("models.js", JS, include_str!("page/models.js")),
];

pub(crate) async fn document() -> Response {
    file(HTML, include_str!("page/page.html"))
}

pub(crate) async fn part(Path(name): Path<String>) -> Result<Response> {
    let part = PARTS.iter().find(|(known, ..)| *known == name);
    part.map(|(_, kind, text)| file(kind, text)).ok_or_else(|| {
        ApiError::new(StatusCode::NOT_FOUND, "the page has no such file").code("not_found")
    })
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
        (REFERRER_POLICY, "no-referrer"),
    ];
    (headers, text).into_response()
}
