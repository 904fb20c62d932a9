//! Uploads: what arrives, what is not sent twice, and what is refused.

use std::path::Path;
use std::time::Duration;

use qhx_base::{CancelToken, ErrorKind, Result};
use qhx_hub::{Hub, LocalFile, Publication, Published, UploadProgress};
use qhx_hub_server::{Fault, Repo, Server};

use super::{name, options, weights};

const TOKEN: &str = "writer";

struct Scene {
    server: Server,
    folder: tempfile::TempDir,
}

impl Scene {
    /// A hub without repositories, and files of a bundle.
    fn new(part: Option<usize>) -> Self {
        let (server, folder) =
            (Server::start(Vec::<Repo>::new()), tempfile::tempdir().expect("a folder"));
        server.writable(TOKEN, part);
        std::fs::write(folder.path().join("m.json"), "{}").expect("a file");
        for (file, seed) in [("a.bin", 1), ("b.bin", 2), ("c.bin", 1)] {
            std::fs::write(folder.path().join(file), weights(100_000, seed)).expect("a file");
        }
        Self { server, folder }
    }

    fn publication(&self) -> Publication {
        let file = |file: &str| LocalFile { path: self.path(file), to: format!("v81/{file}") };
        let files = ["m.json", "a.bin", "b.bin", "c.bin"].map(file).to_vec();
        let mut publication = Publication::new(name("o/n"), files, "Add v81");
        publication.texts.insert("README.md".to_owned(), "# n\n".to_owned());
        publication
    }

    fn path(&self, file: &str) -> std::path::PathBuf {
        self.folder.path().join(file)
    }

    fn publish(&self, publication: &Publication, token: Option<&str>) -> Result<Published> {
        let options = options(&self.server, Path::new("/absent")).token(token.map(str::to_owned));
        Hub::new(options).publish(publication, &|_| {}, &CancelToken::new())
    }
}

#[test]
fn what_is_published_is_what_was_there() {
    for part in [None, Some(30_000)] {
        let scene = Scene::new(part);
        let published = scene.publish(&scene.publication(), Some(TOKEN)).unwrap();
        let mut files: Vec<_> = scene.server.files("o/n");
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let paths: Vec<_> = files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["README.md", "v81/a.bin", "v81/b.bin", "v81/c.bin", "v81/m.json"]);
        for file in &files[1..] {
            let local = std::fs::read(scene.path(file.path.trim_start_matches("v81/"))).unwrap();
            assert_eq!((file.lfs, &file.bytes), (local.len() > 2, &local), "{}", file.path);
        }
        assert_eq!((published.files, published.bytes), (5, 300_002));
        assert_eq!(scene.server.received(), 200_000, "a content that two files have is sent once");
        // Once more: nothing is sent, and the branch stays as it is.
        let again = scene.publish(&scene.publication(), Some(TOKEN)).unwrap();
        assert_eq!((scene.server.received(), again.sent), (200_000, 2));
    }
}

#[test]
fn an_upload_survives_failures_that_pass() {
    for part in [None, Some(30_000)] {
        let scene = Scene::new(part);
        scene.server.fault("/storage/", Fault::Cut(0), 2);
        scene.server.fault("/batch", Fault::Status(503, String::new()), 1);
        scene.server.fault("/commit/", Fault::Status(500, String::new()), 1);
        scene.publish(&scene.publication(), Some(TOKEN)).unwrap();
        assert_eq!(scene.server.files("o/n").len(), 5);
    }
}

#[test]
fn an_upload_goes_on_where_it_ended() {
    let scene = Scene::new(None);
    // The second content fails for good.
    scene.server.fault("/storage/", Fault::Slow(0, Duration::ZERO), 1);
    scene.server.fault("/storage/", Fault::Status(400, String::new()), 9);
    scene.publish(&scene.publication(), Some(TOKEN)).unwrap_err();
    assert!(scene.server.files("o/n").is_empty(), "nothing is visible before all is there");
    let received = scene.server.received();
    assert_eq!(received, 100_000);
    scene.server.heal();
    let published = scene.publish(&scene.publication(), Some(TOKEN)).unwrap();
    assert_eq!((scene.server.received() - received, published.bytes), (100_000, 300_002));
}

#[test]
fn who_may_not_write_is_told() {
    let scene = Scene::new(None);
    let error = scene.publish(&scene.publication(), None).unwrap_err();
    assert_eq!(
        (error.kind(), error.message()),
        (ErrorKind::Usage, "o/n: publishing needs a token")
    );
    assert!(scene.server.requests().is_empty());
    let error = scene.publish(&scene.publication(), Some("reader")).unwrap_err();
    assert_eq!(error.message(), "o/n: the hub does not let this token write there");
    assert!(error.hint_text().is_some_and(|hint| hint.contains("it has to write")), "{error}");
}

#[test]
fn files_that_nobody_could_fetch_are_refused() {
    let scene = Scene::new(None);
    for (to, expected) in [
        ("v81/libQnnHtp.so", "programs are not published"),
        ("../m.json", "cannot be a path of a repository"),
        ("v81/x.tmp", ".gitignore leaves it out"),
    ] {
        let mut publication = scene.publication();
        publication.files[0].to = to.to_owned();
        let error = scene.publish(&publication, Some(TOKEN)).unwrap_err();
        assert!(error.message().contains(expected), "{to}: {error}");
        assert!(scene.server.files("o/n").is_empty());
    }
    let mut publication = scene.publication();
    publication.files[0].path = scene.path("absent");
    assert_eq!(scene.publish(&publication, Some(TOKEN)).unwrap_err().kind(), ErrorKind::Artifact);
}

#[test]
fn the_storage_gets_no_token_and_progress_adds_up() {
    let scene = Scene::new(Some(40_000));
    let sent = std::cell::Cell::new(0);
    let options = options(&scene.server, Path::new("/absent")).token(TOKEN.to_owned());
    let report = |progress: UploadProgress<'_>| {
        if let UploadProgress::Sent(bytes) | UploadProgress::Kept(bytes) = progress {
            sent.set(sent.get() + bytes);
        }
    };
    Hub::new(options).publish(&scene.publication(), &report, &CancelToken::new()).unwrap();
    assert_eq!(sent.get(), 300_000);
    let requests = scene.server.requests();
    let to_storage: Vec<_> =
        requests.iter().filter(|request| request.path.starts_with("/storage/")).collect();
    assert!(to_storage.len() >= 6);
    assert!(to_storage.iter().all(|request| request.header("authorization").is_none()));
}
