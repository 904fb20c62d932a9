//! Models that are added and removed while the server runs.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use qhx::{CancelToken, Error, ErrorKind, Result};
use qhx_server::{Catalog, CatalogEntry, CatalogProgress};
use serde_json::{Value, json};

use crate::bundles::{Running, changed, copy, encoder, folder, language, options};
use crate::client::{Response, head};

/// Catalog of copies of a tiny bundle. `slow` waits until it is let go or cancelled, `broken` fails.
#[derive(Debug, Clone)]
struct Copies {
    folder: PathBuf,
    go: Arc<AtomicBool>,
    obtained: Arc<AtomicUsize>,
}

impl Copies {
    fn new(name: &str) -> Self {
        let folder = folder().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        Self { folder, go: Arc::default(), obtained: Arc::default() }
    }

    fn wait(&self, cancel: &CancelToken) -> Result<()> {
        while !self.go.load(Ordering::Acquire) {
            cancel.check()?;
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Catalog for Copies {
    fn entries(&self) -> Result<Vec<CatalogEntry>> {
        let entry = |name: &str| {
            let entry = CatalogEntry::new(name).does(["text"]).fetch_bytes(1000);
            let entry = entry.title(format!("The {name} one")).licence("MIT".to_owned());
            let here = self.folder.join(name);
            let bundle = here.exists().then(|| here.clone());
            entry.here(here.exists()).bundle(bundle)
        };
        let names = ["copied", "slow", "org/slow", "broken", "panics"];
        Ok(names.iter().map(|name| entry(name)).collect())
    }

    fn obtain(
        &self,
        name: &str,
        progress: &(dyn Fn(CatalogProgress<'_>) + Sync),
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        self.obtained.fetch_add(1, Ordering::Relaxed);
        progress(CatalogProgress { step: "fetching", done: 500, total: Some(1000) });
        match name {
            "broken" => {
                let error = Error::new(ErrorKind::Io, "no space left");
                return Err(error.hint("remove a model"));
            }
            "panics" => panic!("a fault of the catalog"),
            "copied" => {}
            _ => self.wait(cancel)?,
        }
        let to = self.folder.join(name);
        copy(language().parent().unwrap(), &to);
        Ok(to)
    }

    fn remove(&self, name: &str) -> Result<u64> {
        std::fs::remove_dir_all(self.folder.join(name))
            .map_err(|e| Error::caused(ErrorKind::Io, "nothing to remove", e))?;
        Ok(1000)
    }

    fn doctor(&self) -> Result<Value> {
        Ok(json!({"healthy": true, "checks": []}))
    }
}

/// A server with a catalog and no bundle.
fn start(catalog: &Copies) -> Running {
    Running::start(options([]).catalog(catalog.clone()))
}

fn entry(running: &Running, name: &str) -> Value {
    let list = running.client.get("/api/catalog").status(200).json();
    let models = list["models"].as_array().unwrap();
    models.iter().find(|model| model["name"] == name).unwrap_or_else(|| panic!("{list}")).clone()
}

fn lines(response: &Response) -> Vec<Value> {
    response.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The first line of a pull that has begun.
fn begun(running: &Running, name: &str) -> BufReader<TcpStream> {
    let mut stream = running.client.post_open("/api/pull", &json!({"model": name}));
    assert_eq!(head(&mut stream).unwrap().0, 200);
    let mut line = String::new();
    while !line.contains("\"status\":\"fetching\"") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the pull of {name} ended");
    }
    stream
}

fn error(response: Response, status: u16) -> String {
    response.status(status).json()["error"].as_str().expect("a text").to_owned()
}

fn delete(running: &Running, name: &str) -> Response {
    running.client.send("DELETE", "/api/delete", json!({"model": name}).to_string().as_bytes())
}

/// Waits until a model is in a state.
fn until(running: &Running, name: &str, state: &str) {
    while entry(running, name)["state"] != state {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_pulled_model_answers_until_it_is_deleted() {
    let running = start(&Copies::new("catalog"));
    let client = &running.client;
    let before = entry(&running, "copied");
    assert_eq!((&before["state"], &before["removable"]), (&json!("available"), &json!(false)));
    assert_eq!(
        (&before["title"], &before["fetch_bytes"]),
        (&json!("The copied one"), &json!(1000))
    );
    let ask = json!({"model": "copied", "prompt": "a", "max_tokens": 2});
    client.post("/v1/completions", &ask).status(501);
    let pulled = client.post("/api/pull", &json!({"model": "copied:latest"})).status(200);
    assert_eq!(pulled.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(lines(&pulled).last(), Some(&json!({"status": "success"})));
    let served = entry(&running, "copied");
    assert_eq!((&served["state"], &served["removable"]), (&json!("served"), &json!(true)));
    assert_eq!(client.ask("/v1/completions", &ask)["model"], "copied");
    assert_eq!(entry(&running, "copied")["state"], "loaded");
    assert_eq!(client.get("/v1/models").json()["data"][0]["id"], "copied");
    let freed = delete(&running, "copied").status(200).json();
    assert_eq!(freed["freed_bytes"], 1000);
    assert_eq!(entry(&running, "copied")["state"], "available");
    client.post("/v1/completions", &ask).status(501);
    assert!(error(delete(&running, "copied"), 404).contains("not on this machine"));
    assert!(error(delete(&running, "nothing"), 404).contains("nothing"));
}

#[test]
fn clients_that_pull_the_same_model_share_one_pull() {
    let catalog = Copies::new("shared-pull");
    let running = start(&catalog);
    let first = begun(&running, "org/slow");
    let mut second = begun(&running, "org/slow");
    let pulling = entry(&running, "org/slow");
    assert_eq!(pulling["state"], "pulling");
    let progress = json!({"status": "fetching", "completed": 500, "total": 1000});
    assert_eq!(pulling["progress"], progress);
    assert!(error(delete(&running, "org/slow"), 409).contains("being pulled"));
    // One that leaves ends nothing.
    drop(first);
    catalog.go.store(true, Ordering::Release);
    let mut text = String::new();
    while !text.contains("success") {
        assert!(second.read_line(&mut text).unwrap() > 0, "{text}");
    }
    assert_eq!(catalog.obtained.load(Ordering::Relaxed), 1);
    assert_eq!(entry(&running, "org/slow")["state"], "served");
}

#[test]
fn a_pull_ends_once_it_is_cancelled() {
    let catalog = Copies::new("cancelled-pull");
    let running = start(&catalog);
    let mut stream = begun(&running, "org/slow");
    // Others wait for it.
    let waiting = running.client.post_open("/api/pull", &json!({"model": "copied"}));
    until(&running, "copied", "pulling");
    running.client.send("DELETE", "/api/pull/org/slow", b"").status(200);
    let mut text = String::new();
    while !text.contains("the pull was cancelled") {
        assert!(stream.read_line(&mut text).unwrap() > 0, "{text}");
    }
    let ended = entry(&running, "org/slow");
    assert_eq!((&ended["state"], &ended["error"]), (&json!("available"), &Value::Null));
    assert!(error(running.client.send("DELETE", "/api/pull/org/slow", b""), 404).contains("slow"));
    until(&running, "copied", "served");
    drop(waiting);
}

#[test]
fn a_pull_that_fails_says_why_and_what_helps() {
    let running = start(&Copies::new("failed-pull"));
    let failed = running.client.post("/api/pull", &json!({"model": "broken"})).status(200);
    let last = lines(&failed).pop().unwrap();
    assert_eq!(last, json!({"error": "no space left; remove a model"}));
    assert_eq!(entry(&running, "broken")["error"], last["error"]);
    let whole = json!({"model": "broken", "stream": false});
    assert_eq!(json!(error(running.client.post("/api/pull", &whole), 500)), last["error"]);
    let panicked = running.client.post("/api/pull", &json!({"model": "panics"})).status(200);
    assert!(lines(&panicked).pop().unwrap()["error"].is_string());
    let unknown = json!({"model": "../copied"});
    assert!(error(running.client.post("/api/pull", &unknown), 404).contains("nor in the index"));
    // The place is free again.
    running.client.post("/api/pull", &json!({"model": "copied"})).status(200);
    assert_eq!(entry(&running, "copied")["state"], "served");
}

#[test]
fn bundles_of_the_command_line_are_not_deleted() {
    let catalog = Copies::new("kept-bundles");
    let served = options([("language", language()), ("encoder", encoder())]);
    let running = Running::start(served.catalog(catalog.clone()));
    assert!(error(delete(&running, "language"), 403).contains("stays"));
    let listed = entry(&running, "encoder");
    assert_eq!((&listed["does"], &listed["removable"]), (&json!(["embed"]), &json!(false)));
    let pulled = running.client.post("/api/pull", &json!({"model": "language"})).status(200);
    assert_eq!(lines(&pulled), [json!({"status": "success"})]);
    assert_eq!(catalog.obtained.load(Ordering::Relaxed), 0);
}

#[test]
fn models_that_were_pulled_are_served_from_the_next_start() {
    let catalog = Copies::new("next-start");
    start(&catalog).client.post("/api/pull", &json!({"model": "copied"})).status(200);
    let broken = catalog.folder.join("broken");
    std::fs::create_dir_all(broken).unwrap();
    let next = Running::start(options([("language", language())]).catalog(catalog.clone()));
    assert_eq!(entry(&next, "copied")["state"], "served");
    assert_eq!(entry(&next, "broken")["state"], "here", "it has no manifest");
    // Who names no model means the one of the command line.
    let ask = json!({"prompt": "a", "max_tokens": 2});
    assert_eq!(next.client.ask("/v1/completions", &ask)["model"], "language");
    delete(&next, "copied").status(200);
    assert_eq!(catalog.obtained.load(Ordering::Relaxed), 1);
}

#[test]
fn a_model_in_use_is_not_deleted() {
    let catalog = Copies::new("used");
    let running = start(&catalog);
    running.client.post("/api/pull", &json!({"model": "copied"})).status(200);
    // It would take minutes, and the client reads nothing.
    let prompts = vec!["a"; 1000];
    let long = json!({"model": "copied", "prompt": prompts, "n": 16, "stream": true, "seed": 1});
    let mut answer = running.client.post_unread("/v1/completions", &long);
    assert_eq!(head(&mut answer).unwrap().0, 200);
    assert!(error(delete(&running, "copied"), 409).contains("requests use it"));
    assert_eq!(entry(&running, "copied")["state"], "loaded");
    drop(answer);
    while delete(&running, "copied").status != 200 {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(entry(&running, "copied")["state"], "available");
}

#[test]
fn a_model_is_loaded_and_unloaded_on_request() {
    let manifest = changed(language(), "unloaded", |_| {});
    let running = Running::start(options([("one", manifest.as_path()), ("two", encoder())]));
    for model in ["one", "two"] {
        running.client.ask("/api/generate", &json!({"model": model}));
        assert_eq!(entry(&running, model)["state"], "loaded");
        running.client.ask("/api/generate", &json!({"model": model, "keep_alive": 0}));
        assert_eq!(entry(&running, model)["state"], "served");
        // It stays once it is used again.
        running.client.ask("/api/generate", &json!({"model": model}));
        running.client.ask("/tokenize", &json!({"model": model, "prompt": "a"}));
        assert_eq!(entry(&running, model)["state"], "loaded");
    }
}

#[test]
fn without_a_catalog_nothing_is_added_or_checked() {
    let client = &crate::bundles::shared().client;
    let list = client.get("/api/catalog").status(200).json();
    assert_eq!(list["index"], false);
    let states = list["models"].as_array().unwrap().iter().map(|model| &model["name"]);
    assert_eq!(states.collect::<Vec<_>>(), ["language", "encoder", "recurrent"]);
    assert!(error(client.get("/api/doctor"), 501).contains("qhx doctor"));
    assert!(qhx_server::Server::bind(options([])).is_err(), "there is nothing to serve");
}

#[test]
fn keys_and_origins_guard_models_as_they_do_answers() {
    let options = options([]).catalog(Copies::new("guarded")).api_keys(["secret".to_owned()]);
    let running = Running::start(options);
    let pull = json!({"model": "copied"}).to_string();
    for (method, path, body) in [
        ("GET", "/api/catalog", ""),
        ("GET", "/api/doctor", ""),
        ("POST", "/api/pull", pull.as_str()),
        ("DELETE", "/api/pull/copied", ""),
        ("DELETE", "/api/delete", pull.as_str()),
    ] {
        running.client.send(method, path, body.as_bytes()).status(401);
        let elsewhere = running.client.clone().with("authorization", "Bearer secret");
        let elsewhere = elsewhere.with("origin", "https://example.org");
        elsewhere.send(method, path, body.as_bytes()).status(403);
    }
    let own = running.client.clone().with("authorization", "Bearer secret");
    assert_eq!(own.get("/api/doctor").status(200).json()["healthy"], true);
    for path in ["/", "/page/page.css", "/page/page.js"] {
        let part = running.client.get(path).status(200);
        let policy = part.header("content-security-policy").unwrap();
        assert!(!policy.contains("unsafe"), "{policy}");
    }
}

#[test]
fn a_server_that_stops_ends_its_pulls() {
    let mut running = start(&Copies::new("stopping"));
    let _stream = begun(&running, "slow");
    running.end();
}
