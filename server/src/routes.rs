//! Which address is answered by what, and what every request goes through.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Extension, Router};
use serde_json::json;

use crate::app::{Peer, Shared};
use crate::connections::{self, Crowded};
use crate::error::{ApiError, Result, json_response};
use crate::metrics::Gauges;
use crate::request::{Context, Memory};
use crate::request_metrics::Tally;
use crate::{
    audio, chat, completions, embeddings, ids, infill, manage, messages, ollama, page, realtime,
    rerank, responses, speech, tokens,
};

/// The routes, requests and responses, as [OpenAPI](https://spec.openapis.org/oas/v3.1.0) has them.
const OPENAPI: &str = include_str!("openapi.json");

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The addresses, each with the method that it is asked with, and what answers it. [`OPENAPI`] describes them.
fn routes() -> [(Method, &'static str, MethodRouter); 37] {
    [
        (Method::GET, "/", get(page::document)),
        (Method::GET, "/page/{name}", get(page::part)),
        (Method::GET, "/health", get(health)),
        (Method::GET, "/metrics", get(metrics)),
        (Method::GET, "/openapi.json", get(openapi)),
        (Method::GET, "/v1/models", get(models)),
        (Method::GET, "/v1/models/{*id}", get(model)),
        (Method::POST, "/v1/chat/completions", post(chat::completions)),
        (Method::POST, "/v1/completions", post(completions::complete)),
        (Method::POST, "/v1/embeddings", post(embeddings::embed)),
        (Method::POST, "/v1/rerank", post(rerank::rerank)),
        (Method::POST, "/v1/messages", post(messages::create)),
        (Method::POST, "/v1/messages/count_tokens", post(messages::count_tokens)),
        (Method::POST, "/v1/responses", post(responses::create)),
        (Method::GET, "/v1/responses/{id}", get(responses::retrieve)),
        (Method::DELETE, "/v1/responses/{id}", delete(responses::forget)),
        (Method::GET, "/v1/responses/{id}/input_items", get(responses::input_items)),
        (Method::POST, "/v1/audio/transcriptions", post(audio::transcribe)),
        (Method::POST, "/v1/audio/translations", post(audio::translate)),
        (Method::POST, "/v1/audio/speech", post(speech::speak)),
        (Method::GET, "/v1/realtime", get(realtime::connect)),
        (Method::POST, "/tokenize", post(tokens::tokenize)),
        (Method::POST, "/infill", post(infill::infill)),
        (Method::GET, "/api/version", get(ollama::version)),
        (Method::GET, "/api/tags", get(ollama::tags)),
        (Method::GET, "/api/ps", get(ollama::loaded)),
        (Method::POST, "/api/show", post(ollama::show)),
        (Method::POST, "/api/chat", post(ollama::chat)),
        (Method::POST, "/api/generate", post(ollama::generate)),
        (Method::POST, "/api/embed", post(ollama::embed)),
        (Method::POST, "/api/embeddings", post(ollama::embeddings)),
        (Method::POST, "/api/pull", post(manage::pull)),
        (Method::DELETE, "/api/pull/{*name}", delete(manage::cancel)),
        (Method::POST, "/api/create", post(ollama::refused)),
        (Method::DELETE, "/api/delete", delete(manage::remove)),
        (Method::GET, "/api/catalog", get(manage::catalog)),
        (Method::GET, "/api/doctor", get(manage::doctor)),
    ]
}

/// All routes.
pub(crate) fn router(shared: &Shared) -> Router {
    let add = |router: Router, (_, path, answer)| router.route(path, answer);
    routes()
        .into_iter()
        .fold(Router::new(), add)
        .fallback(not_found)
        .method_not_allowed_fallback(not_allowed)
        .layer(from_fn_with_state(Arc::clone(shared), guard))
}

/// Middleware of every request: gives it an id and a record, and checks access.
async fn guard(State(shared): State<Shared>, mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let id = given.and_then(ids::given).map_or_else(|| ids::new("req_"), str::to_owned);
    let route = route(&request);
    let path = request.uri().path();
    let (anthropic, ollama) = (path.starts_with("/v1/messages"), path.starts_with("/api/"));
    let tally = Arc::new(Tally::new(Arc::clone(&shared), id.clone(), route));
    let origin = request.headers().get(header::ORIGIN).cloned();
    let context = Context {
        client: client(&shared, &request),
        key: key(request.headers()).and_then(|key| shared.number_of(key)),
        tally: Arc::clone(&tally),
        shared: Arc::clone(&shared),
        memory: Memory::default(),
    };
    let mut response = match admit(&shared, &request) {
        Err(error) => error.into_response(),
        Ok(()) if request.method() == Method::OPTIONS => preflight(),
        Ok(()) => {
            request.extensions_mut().insert(context);
            next.run(request).await
        }
    };
    let error = response.extensions_mut().remove::<ApiError>();
    tally.update(|record| {
        record.status = response.status().as_u16();
        record.error = error.as_ref().map(ApiError::reason);
    });
    let own = match error {
        Some(error) if anthropic => Some(error.anthropic()),
        Some(error) if ollama => Some(error.ollama()),
        _ => None,
    };
    if let Some(own) = own {
        *response.body_mut() = Body::from(own.to_string());
    }
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, id);
    }
    if let Some(origin) = origin.filter(|origin| allows(&shared, origin)) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        let exposed = HeaderValue::from_static("x-request-id, retry-after");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
    response
}

/// Name of the route in the record and the metrics; an unknown path is no more than `(unknown)` there.
fn route(request: &Request) -> String {
    let known = [Method::GET, Method::POST, Method::DELETE, Method::HEAD, Method::OPTIONS];
    let method = known.iter().find(|method| *method == request.method());
    let path = request.extensions().get::<MatchedPath>();
    let path = path.map_or("(unknown)", MatchedPath::as_str);
    format!("{} {path}", method.map_or("(other)", Method::as_str))
}

/// The key of a request, in one of the headers that clients have. A page that opens a WebSocket can set none but the
/// list of its protocols.
fn key(headers: &HeaderMap) -> Option<&str> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let protocol = || {
        let mut protocols = text(header::SEC_WEBSOCKET_PROTOCOL)?.split(',').map(str::trim);
        protocols.find_map(|name| name.strip_prefix("openai-insecure-api-key."))
    };
    bearer.or_else(|| text(API_KEY).map(str::trim)).or_else(protocol)
}

/// Client that a request counts as: its address, and its key where keys are asked for. Without them, a key is whatever
/// a client likes.
fn client(shared: &Shared, request: &Request) -> u64 {
    let mut hasher = DefaultHasher::new();
    if shared.asks_for_keys() {
        key(request.headers()).hash(&mut hasher);
    }
    let peer = request.extensions().get::<Peer>();
    peer.map(|peer| connections::client(peer.address)).hash(&mut hasher);
    hasher.finish()
}

fn admit(shared: &Shared, request: &Request) -> Result<()> {
    let (headers, path) = (request.headers(), request.uri().path());
    let open = path == "/health" || path == "/" || path.starts_with("/page/");
    same_place(shared, headers)?;
    let crowded = request.extensions().get::<Peer>().and_then(|peer| peer.crowded);
    if let Some(crowded) = crowded.filter(|_| path != "/health") {
        let (status, whose) = match crowded {
            Crowded::Server => (StatusCode::SERVICE_UNAVAILABLE, "the server"),
            Crowded::Client => (StatusCode::TOO_MANY_REQUESTS, "this client"),
        };
        let message = format!("{whose} has as many connections open as it may; try again later");
        return Err(ApiError::new(status, message).code("too_many_connections"));
    }
    if request.method() == Method::OPTIONS {
        // A browser asks without the key.
        return Ok(());
    }
    if !open
        && shared.asks_for_keys()
        && key(headers).and_then(|key| shared.number_of(key)).is_none()
    {
        let message = match key(headers) {
            Some(_) => "the API key is wrong",
            None => "there is no API key: expected the header authorization: Bearer KEY",
        };
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key"));
    }
    if !open && shared.is_stopping() {
        return Err(ApiError::stopping());
    }
    Ok(())
}

/// Refuses requests that a browser sends for a page of somebody else: those of other origins, and, where no key is
/// asked for, those by a name that may be anybody's (DNS rebinding).
fn same_place(shared: &Shared, headers: &HeaderMap) -> Result<()> {
    let forbidden = |code: &'static str, message: String| {
        Err(ApiError::new(StatusCode::FORBIDDEN, message).code(code))
    };
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if let Some(origin) = headers.get(header::ORIGIN) {
        let own = origin.to_str().is_ok_and(|origin| {
            origin.split_once("://").is_some_and(|(_, of)| !host.is_empty() && of == host)
        });
        if !own && !allows(shared, origin) {
            let message = "requests of this origin are not answered: see --allow-origin";
            return forbidden("origin_not_allowed", message.to_owned());
        }
    }
    if !shared.asks_for_keys() && !shared.hosts.are_named(host) {
        let host: String = host.chars().take(100).collect();
        let message = format!(
            "the host {host:?} is not one of this server's: without --api-key-file it answers to addresses, \
             localhost and the machine's name, and to those of --allow-host"
        );
        return forbidden("host_not_allowed", message);
    }
    Ok(())
}

fn allows(shared: &Shared, origin: &HeaderValue) -> bool {
    let allowed = &shared.options.allowed_origins;
    allowed.iter().any(|allowed| allowed == "*" || origin.as_bytes() == allowed.as_bytes())
}

fn preflight() -> Response {
    let headers = "authorization, content-type, x-api-key, x-request-id";
    let allowed = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, DELETE"),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, headers),
        (header::ACCESS_CONTROL_MAX_AGE, "600"),
    ];
    (StatusCode::NO_CONTENT, allowed).into_response()
}

async fn health(Extension(context): Extension<Context>) -> Response {
    match context.shared.is_stopping() {
        true => json_response(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": "stopping"})),
        false => json_response(StatusCode::OK, &json!({"status": "ok"})),
    }
}

async fn metrics(Extension(context): Extension<Context>) -> Response {
    let shared = &context.shared;
    let (waiting, running) = shared.queue.counts();
    let gauges = shared.registry.gauges(Gauges { waiting, running, ..Gauges::default() });
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], shared.metrics.text(&gauges)).into_response()
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

async fn models(Extension(context): Extension<Context>) -> Response {
    let models = context.shared.registry.models();
    let models = models.iter().map(|model| model.json());
    let list = json!({"object": "list", "data": models.collect::<Vec<_>>()});
    json_response(StatusCode::OK, &list)
}

async fn model(Extension(context): Extension<Context>, Path(id): Path<String>) -> Result<Response> {
    let model = context.shared.registry.find(Some(&id))?;
    Ok(json_response(StatusCode::OK, &model.json()))
}

async fn not_found() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "there is nothing at this address").code("not_found")
}

async fn not_allowed() -> ApiError {
    let message = "this address is not asked with this method";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    fn document() -> Value {
        serde_json::from_str(OPENAPI).expect("the document is JSON")
    }

    /// The names that requests have fields of, wherever they stand, and the schemas that they are in.
    fn fields(schema: &Value, document: &Value, found: &mut BTreeSet<String>) {
        match schema {
            Value::Object(map) => {
                let named = schema["$ref"].as_str().and_then(|at| at.strip_prefix('#'));
                if let Some(name) = named.filter(|name| found.insert((*name).to_owned())) {
                    fields(
                        document.pointer(name).expect("what is named is there"),
                        document,
                        found,
                    );
                }
                if let Some(properties) = schema["properties"].as_object() {
                    found.extend(properties.keys().cloned());
                }
                map.values().for_each(|inner| fields(inner, document, found));
            }
            Value::Array(list) => list.iter().for_each(|inner| fields(inner, document, found)),
            _ => {}
        }
    }

    #[test]
    fn the_document_has_every_route_and_no_other() {
        let document = document();
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
        let paths = document["paths"].as_object().expect("there are paths");
        let methods = |(path, methods): (&String, &Value)| {
            let methods = methods.as_object().expect("there are methods").keys();
            methods.map(|method| format!("{} {path}", method.to_uppercase())).collect::<Vec<_>>()
        };
        let described: BTreeSet<_> = paths.iter().flat_map(methods).collect();
        let named =
            |(method, path, _): (Method, &str, _)| format!("{method} {}", path.replace('*', ""));
        assert_eq!(described, routes().into_iter().map(named).collect());
    }

    /// Code that reads a field has the field's name in quotes.
    #[test]
    fn the_document_has_every_field_that_is_read() {
        let (document, mut described) = (document(), BTreeSet::new());
        for operation in document["paths"].as_object().expect("there are paths").values() {
            fields(&operation["post"]["requestBody"], &document, &mut described);
        }
        described.retain(|name| !name.starts_with('/'));
        let folder = qhx_paths::workspace().join("server/src");
        let source = |name: &str| {
            let text = std::fs::read_to_string(folder.join(name)).expect("the source is there");
            let tests = text.find("#[cfg(test)]").unwrap_or(text.len());
            text[..tests].to_owned()
        };
        let sources = [
            "audio.rs",
            "chat.rs",
            "completions.rs",
            "conversation.rs",
            "custom_tools.rs",
            "embeddings.rs",
            "generation_request.rs",
            "infill.rs",
            "manage.rs",
            "messages.rs",
            "ollama.rs",
            "rerank.rs",
            "responses.rs",
            "speech.rs",
            "tokens.rs",
        ];
        let all: String = sources.iter().map(|name| source(name)).collect();
        let readers = [
            ".text(",
            ".flag(",
            ".list(",
            ".object(",
            ".number(",
            ".count(",
            ".texts(",
            ".get(",
            "needed(",
            "stops(fields, ",
        ];
        let mut read = BTreeSet::new();
        for reader in readers {
            let calls = all.match_indices(reader).filter_map(|(at, _)| {
                let name = all[at + reader.len()..].strip_prefix('"')?.split_once('"')?.0;
                let plain = name.bytes().all(|c| c.is_ascii_lowercase() || c == b'_');
                plain.then(|| name.to_owned())
            });
            read.extend(calls);
        }
        assert!(read.len() > 50, "{read:?}");
        let missing: Vec<_> = read.difference(&described).collect();
        assert!(missing.is_empty(), "these are read, and not described: {missing:?}");
        let idle = described.iter().filter(|name| !all.contains(&format!("\"{name}\"")));
        let idle: Vec<_> = idle.collect();
        assert!(idle.is_empty(), "these are described, and not read: {idle:?}");
    }

    /// Names of the fields of a schema's object.
    fn names(schema: &Value, document: &Value) -> Vec<String> {
        if let Some(at) = schema["$ref"].as_str().and_then(|at| at.strip_prefix('#')) {
            return names(document.pointer(at).expect("what is named is there"), document);
        }
        let parts = ["allOf", "anyOf"].into_iter().filter_map(|key| schema[key].as_array());
        let mut all: Vec<_> = parts.flatten().flat_map(|part| names(part, document)).collect();
        let own = schema["properties"].as_object().into_iter().flatten();
        // A field that may only be null is refused.
        let own = own.filter(|(_, schema)| schema["type"] != "null");
        all.extend(own.map(|(name, _)| name.clone()));
        all
    }

    /// Marks around the table in `docs/server.md`.
    const MARKS: [&str; 2] = ["<!-- fields: made by a test -->\n", "<!-- end of fields -->\n"];

    #[test]
    fn the_page_has_every_field_that_is_read_or_refused() {
        use crate::generation_request::{REFUSED, UNSUPPORTED};
        let document = document();
        let mut table = "| route | done | refused |\n|---|---|---|\n".to_owned();
        for (method, path, _) in routes() {
            let content = &document["paths"][path]["post"]["requestBody"]["content"];
            let Some(kinds) = content.as_object().filter(|_| method == Method::POST) else {
                continue;
            };
            let done: BTreeSet<_> =
                kinds.values().flat_map(|kind| names(&kind["schema"], &document)).collect();
            let refused: Vec<&[&str]> = match path {
                "/v1/chat/completions" => vec![&REFUSED, &UNSUPPORTED],
                "/v1/completions" => vec![&completions::REFUSED, &UNSUPPORTED],
                "/v1/messages" => vec![&messages::REFUSED],
                "/v1/responses" => vec![&responses::REFUSED, &["conversation"]],
                "/v1/audio/speech" => vec![&speech::REFUSED],
                "/v1/audio/transcriptions" => vec![&["include[]"]],
                "/api/generate" => vec![&ollama::REFUSED],
                _ => vec![],
            };
            let listed = |names: Vec<String>| {
                names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
            };
            let mut refused: Vec<_> = refused.concat().into_iter().map(str::to_owned).collect();
            refused.sort();
            assert!(refused.iter().all(|name| !done.contains(name)), "{path}: {refused:?}");
            let done = listed(done.into_iter().collect());
            table.push_str(&format!("| `{path}` | {done} | {} |\n", listed(refused)));
        }
        let path = qhx_paths::workspace().join("docs/server.md");
        let page = std::fs::read_to_string(&path).expect("the page is there");
        let (before, rest) = page.split_once(MARKS[0]).expect("the table begins");
        let (found, after) = rest.split_once(MARKS[1]).expect("the table ends");
        if std::env::var("INSTA_UPDATE").is_ok_and(|v| v == "always") {
            let [begin, end] = MARKS;
            let page = format!("{before}{begin}{table}{end}{after}");
            return std::fs::write(&path, page).expect("the page is written");
        }
        assert_eq!(found, table, "INSTA_UPDATE=always writes the table into {}", path.display());
    }
}
