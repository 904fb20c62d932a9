//! Routes that add and remove models, and check the machine.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use http_body::Frame;
use qhx::catch_panic;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use crate::app::Shared;
use crate::catalog::{Catalog, CatalogEntry};
use crate::error::{ApiError, Result, broken, json_response};
use crate::fields::Fields;
use crate::ollama::name;
use crate::pulls::{Failure, Pull, PullState, busy};
use crate::registry::Served;
use crate::request::{Asked, Context};

/// Shortest time between two lines of progress.
const INTERVAL: Duration = Duration::from_millis(100);

/// Lines that wait for a client to read them.
const LINES: usize = 4;

/// Models of a catalog that are listed.
const MAX_ENTRIES: usize = 2000;

/// Serves the models that were obtained before. One that cannot be served is one to obtain again.
pub(crate) fn begin_with_obtained(shared: &Shared) {
    let Some(catalog) = &shared.options.catalog else { return };
    let entries = catalog.entries().unwrap_or_else(|error| {
        tracing::error!("the catalog: {}", error.report());
        Vec::new()
    });
    for entry in entries.into_iter().filter(|entry| entry.here) {
        let added = entry.bundle.map(|bundle| shared.registry.add(&entry.name, &bundle));
        if let Some(Err(error)) = added {
            tracing::warn!("model {} is not served: {}", entry.name, error.report());
        }
    }
}

/// Lists all models that are served, and those that can be.
pub(crate) async fn catalog(Extension(context): Extension<Context>) -> Result<Response> {
    context.blocking(|context| Ok(json_response(StatusCode::OK, &listed(&context.shared)))).await
}

/// `GET /api/catalog` as JSON. A catalog that cannot be read leaves the models that are served.
fn listed(shared: &Shared) -> Value {
    let catalog = shared.options.catalog.as_deref();
    let entries = catalog.map_or(Ok(Vec::new()), Catalog::entries);
    let error = entries.as_ref().err().map(shown);
    let (states, failures) = (shared.pulls.states(), shared.pulls.failures());
    let served = shared.registry.models();
    let mut entries = entries.unwrap_or_default();
    entries.truncate(MAX_ENTRIES);
    let own = served.iter().filter(|model| !entries.iter().any(|entry| entry.name == model.name));
    let own: Vec<_> = own.map(|model| CatalogEntry::new(model.name.as_str())).collect();
    let all = own.into_iter().chain(entries).map(|entry| {
        let model = served.iter().find(|model| model.is_named(&entry.name));
        let pull = states.get(&entry.name);
        let mut json = json!(entry);
        json["state"] = state(&entry, model, pull).into();
        json["removable"] =
            (catalog.is_some() && model.map_or(entry.here, |model| model.added)).into();
        if let Some(model) = model {
            of_served(&mut json, model);
        }
        if let Some(pull) = pull {
            json["progress"] = pull.line();
        }
        json["error"] = failures.get(&entry.name).map(String::as_str).into();
        json
    });
    json!({"index": catalog.is_some(), "error": error, "models": all.collect::<Vec<_>>()})
}

fn state(
    entry: &CatalogEntry,
    model: Option<&Arc<Served>>,
    pull: Option<&PullState>,
) -> &'static str {
    match (pull, model) {
        (Some(_), _) => "pulling",
        (None, Some(model)) if model.is_loaded() => "loaded",
        (None, Some(_)) => "served",
        (None, None) if entry.here => "here",
        (None, None) => "available",
    }
}

/// Adds what is known of a model that is served.
fn of_served(json: &mut Value, model: &Served) {
    json["here"] = true.into();
    json["does"] = model.does().into();
    if json["disk_bytes"].is_null() {
        json["disk_bytes"] = model.file_bytes().into();
    }
    json["loaded_bytes"] = model.loaded_bytes().into();
}

/// Obtains a model of the catalog and serves it. A model that is served succeeds at once.
pub(crate) async fn pull(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let stream = fields.flag("stream")?.unwrap_or(true);
    let name = name(&fields)?.ok_or_else(|| fields.missing("model"))?.to_owned();
    if context.shared.registry.named(&name).is_some() {
        let mut line = PullState::Done.line().to_string();
        line.push('\n');
        return Ok(([(header::CONTENT_TYPE, kind(stream))], line).into_response());
    }
    let of = name.clone();
    let pull = context.blocking(move |context| begin(&context.shared, &of)).await?;
    let mut state = pull.watch();
    if stream {
        let (sender, lines) = mpsc::channel(LINES);
        tokio::spawn(send(context, state, sender));
        return Ok(([(header::CONTENT_TYPE, kind(true))], Body::new(Lines(lines))).into_response());
    }
    let last = state.wait_for(PullState::is_over).await.map_err(|_| broken())?.clone();
    match last {
        PullState::Failed(failure) => {
            let status = match failure.cancelled {
                true => StatusCode::SERVICE_UNAVAILABLE,
                false => StatusCode::INTERNAL_SERVER_ERROR,
            };
            Err(ApiError::new(status, failure.message).param("model").code("pull_failed"))
        }
        state => Ok(json_response(StatusCode::OK, &state.line())),
    }
}

fn kind(stream: bool) -> &'static str {
    if stream { "application/x-ndjson" } else { "application/json" }
}

/// The pull of a model, which begins unless it is under way.
fn begin(shared: &Shared, name: &str) -> Result<Arc<Pull>> {
    let Some(catalog) = &shared.options.catalog else {
        let shown: String = name.chars().take(100).collect();
        let message = "models are given when the server starts: qhx pull fetches one, and qhx serve serves it";
        return Err(ApiError::new(StatusCode::NOT_FOUND, format!("{shown:?}: {message}"))
            .param("model")
            .code("model_not_found"));
    };
    entry(&**catalog, name)?;
    let (pull, new) = shared.pulls.begin(name, &shared.queue.cancel)?;
    if new {
        tokio::spawn(obtain(Arc::clone(shared), Arc::clone(&pull)));
    }
    Ok(pull)
}

/// Obtains a model, whether or not a client waits for it.
async fn obtain(shared: Shared, pull: Arc<Pull>) {
    let place = shared.pulls.place().await;
    let (of, pulled) = (Arc::clone(&shared), Arc::clone(&pull));
    let work = move || {
        let catalog = of.options.catalog.as_deref();
        let progress = |progress: crate::CatalogProgress<'_>| pulled.note(progress);
        catch_panic(|| {
            pulled.cancel.check()?;
            let Some(catalog) = catalog else { return Ok(()) };
            let bundle = catalog.obtain(&pulled.name, &progress, &pulled.cancel)?;
            of.registry.add(&pulled.name, &bundle)
        })
    };
    let done = tokio::task::spawn_blocking(work).await;
    drop(place);
    let failure = match done {
        Ok(Ok(())) => None,
        Ok(Err(error)) => {
            let cancelled = error.kind() == qhx::ErrorKind::Cancelled || pull.cancel.is_cancelled();
            if !cancelled {
                tracing::error!("pulling {}: {}", pull.name, error.report());
            }
            let message = match cancelled {
                true => format!("{}: the pull was cancelled", pull.name),
                false => shown(&error),
            };
            Some(Failure { message, cancelled })
        }
        Err(_) => {
            let message = format!("{}: the pull ended without a result", pull.name);
            Some(Failure { message, cancelled: false })
        }
    };
    shared.pulls.end(&pull, failure);
}

/// Message and hint: who pulls a model is the one to act on them.
fn shown(error: &qhx::Error) -> String {
    match error.hint_text() {
        Some(hint) => format!("{}; {hint}", error.message()),
        None => error.message().to_owned(),
    }
}

/// The entry of a name.
fn entry(catalog: &dyn Catalog, name: &str) -> Result<CatalogEntry> {
    let entries = catalog.entries().map_err(|e| failed(&e))?;
    entries.into_iter().find(|entry| entry.name == name).ok_or_else(|| {
        let name: String = name.chars().take(100).collect();
        let message = format!("the model {name:?} is neither served nor in the index here");
        ApiError::new(StatusCode::NOT_FOUND, message).param("model").code("model_not_found")
    })
}

/// Error of a catalog.
fn failed(error: &qhx::Error) -> ApiError {
    tracing::error!("the catalog: {}", error.report());
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, shown(error)).code(error.kind().name())
}

/// Sends the states of a pull as lines, the last of which is its end.
async fn send(context: Context, mut state: watch::Receiver<PullState>, lines: mpsc::Sender<Bytes>) {
    let mut stopping = context.shared.stopping.subscribe();
    loop {
        let now = state.borrow_and_update().clone();
        if let PullState::Failed(failure) = &now {
            let reason = failure.message.clone();
            context.tally.update(|record| record.error = Some(reason));
        }
        let line = format!("{}\n", now.line());
        if lines.send(line.into()).await.is_err() || now.is_over() {
            return;
        }
        sleep(INTERVAL).await;
        let changed = async {
            tokio::select! {
                changed = state.changed() => changed.is_ok(),
                _ = lines.closed() => false,
                // What is cancelled then says so.
                _ = stopping.wait_for(|stopping| *stopping) => false,
            }
        };
        if !changed.await {
            return;
        }
    }
}

/// Body of lines as they come.
struct Lines(mpsc::Receiver<Bytes>);

impl http_body::Body for Lines {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|line| line.map(|line| Ok(Frame::data(line))))
    }
}

/// Ends the pull of a model.
pub(crate) async fn cancel(
    Extension(context): Extension<Context>,
    Path(name): Path<String>,
) -> Result<Response> {
    let pull = context.shared.pulls.find(&name).ok_or_else(|| {
        let name: String = name.chars().take(100).collect();
        let message = format!("the model {name:?} is not being pulled");
        ApiError::new(StatusCode::NOT_FOUND, message).code("not_found")
    })?;
    let mut state = pull.watch();
    pull.cancel.cancel();
    // A model that is made ends at its next step, which may take a while.
    let _ = context.in_time(state.wait_for(PullState::is_over), broken).await;
    Ok(json_response(StatusCode::OK, &json!({"status": "cancelled"})))
}

/// Unloads a model that was obtained, serves it no more, and removes its files.
pub(crate) async fn remove(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let name = name(&fields)?.ok_or_else(|| fields.missing("model"))?.to_owned();
    let freed = context.blocking(move |context| removed(&context.shared, &name)).await?;
    Ok(json_response(StatusCode::OK, &json!({"status": "success", "freed_bytes": freed})))
}

fn removed(shared: &Shared, name: &str) -> Result<u64> {
    let served = shared.registry.named(name);
    if served.as_ref().is_some_and(|model| !model.added) {
        let message = format!("{name}: it was given when the server started, and stays");
        return Err(ApiError::new(StatusCode::FORBIDDEN, message)
            .param("model")
            .code("not_removable"));
    }
    let Some(catalog) = &shared.options.catalog else {
        let name: String = name.chars().take(100).collect();
        let message = format!("the model {name:?} is not served here");
        return Err(ApiError::new(StatusCode::NOT_FOUND, message)
            .param("model")
            .code("model_not_found"));
    };
    let _removing = shared.pulls.removing(name)?;
    if served.is_none() && !entry(&**catalog, name)?.here {
        let message = format!("{name}: it is not on this machine");
        return Err(ApiError::new(StatusCode::NOT_FOUND, message)
            .param("model")
            .code("model_not_found"));
    }
    if served.is_some_and(|model| !shared.registry.withdraw(&model)) {
        return Err(busy(name, "requests use it; try again once they are over"));
    }
    catalog.remove(name).map_err(|e| failed(&e))
}

/// State of this machine.
pub(crate) async fn doctor(Extension(context): Extension<Context>) -> Result<Response> {
    if context.shared.options.catalog.is_none() {
        let message = "this server does not check its machine: qhx doctor does";
        return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message).code("not_served"));
    }
    let _one = context.shared.checking.acquire().await.map_err(|_| broken())?;
    let check = |context: Context| match &context.shared.options.catalog {
        Some(catalog) => catalog.doctor().map_err(|e| failed(&e)),
        None => Err(broken()),
    };
    Ok(json_response(StatusCode::OK, &context.blocking(check).await?))
}
