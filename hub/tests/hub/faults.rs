//! Failures that another attempt mends, and those that it does not.

use std::sync::Mutex;
use std::time::Duration;

use qhx_base::{CancelToken, ErrorKind};
use qhx_hub::Hub;
use qhx_hub_server::{Fault, Repo, Server};

use crate::{options, pull, pull_noting, repo, select, started, tree, weights};

fn large() -> Repo {
    Repo::new("o/n", 'a').file("m.json", "{}").lfs("decode.bin", weights(1 << 20, 1))
}

/// Downloads with a fault, and returns what was reported and the ranges that were asked for.
fn with(fault: Fault, times: usize) -> (Vec<String>, Vec<Option<u64>>, u64) {
    let (server, cache) =
        (Server::start([large()]), tempfile::tempdir().expect("what the test needs"));
    server.fault("decode.bin", fault, times);
    let notes = Mutex::default();
    let hub = Hub::new(options(&server, cache.path()).idle(Duration::from_millis(300)));
    let pulled = pull_noting(&hub, "o/n", &notes).expect("what the test needs");
    assert_eq!(
        std::fs::read(pulled.path.join("decode.bin")).expect("what the test needs"),
        weights(1 << 20, 1)
    );
    let requests = server.requests();
    let ranges = requests.iter().filter(|request| request.path.ends_with("decode.bin"));
    (
        notes.into_inner().expect("what the test needs"),
        ranges.map(|request| request.from()).collect(),
        server.sent(),
    )
}

#[test]
fn a_cut_connection_is_taken_up_where_it_ended() {
    let (notes, ranges, sent) = with(Fault::Cut(200_000), 4);
    assert_eq!(ranges, [None, Some(200_000), Some(400_000), Some(600_000), Some(800_000)]);
    assert_eq!(sent, (1 << 20) + 2);
    assert!(
        notes[0].contains("decode.bin: the connection ended after 200000 of 1048576 bytes"),
        "{notes:?}"
    );
}

#[test]
fn a_silent_connection_is_given_up() {
    let (notes, ranges, _) = with(Fault::Stall(200_000), 1);
    assert_eq!(ranges, [None, Some(200_000)]);
    assert!(notes[0].contains("after 200000 of"), "{notes:?}");
}

#[test]
fn a_hub_without_ranges_starts_again() {
    let (server, cache) = (Server::start([large()]), tempfile::tempdir().unwrap());
    server.fault("decode.bin", Fault::Cut(200_000), 1);
    server.fault("decode.bin", Fault::IgnoreRange, 1);
    let notes = Mutex::default();
    let hub = Hub::new(options(&server, cache.path()));
    let pulled = pull_noting(&hub, "o/n", &notes).unwrap();
    assert_eq!(pulled.fetched_bytes, (1 << 20) + 2 + 200_000);
    assert!(notes.into_inner().unwrap().contains(&"lost 200000".to_owned()));
}

#[test]
fn a_range_that_is_refused_starts_again() {
    let (server, cache) = (Server::start([large()]), tempfile::tempdir().unwrap());
    server.fault("decode.bin", Fault::Cut(200_000), 1);
    server.fault("decode.bin", Fault::Status(416, String::new()), 1);
    let hub = Hub::new(options(&server, cache.path()));
    pull(&hub, "o/n").unwrap();
    server.fault("decode.bin", Fault::Status(416, String::new()), 9);
    let other = tempfile::tempdir().unwrap();
    let error = pull(&Hub::new(options(&server, other.path())), "o/n").unwrap_err();
    assert!(error.message().contains("other ranges than those asked for"), "{error}");
}

#[test]
fn a_busy_hub_is_asked_again() {
    for (status, headers) in [(429, "Retry-After: 0\r\n"), (503, ""), (500, ""), (408, "")] {
        let (notes, ranges, _) = with(Fault::Status(status, headers.to_owned()), 3);
        assert_eq!(ranges.len(), 4, "{status}");
        assert!(notes[0].contains(&format!("(HTTP {status})")), "{notes:?}");
    }
}

#[test]
fn patience_has_an_end() {
    let (server, _cache, hub) = started(large());
    server.fault("decode.bin", Fault::Status(503, String::new()), 99);
    let error = pull(&hub, "o/n").unwrap_err();
    assert_eq!((error.kind(), error.code()), (ErrorKind::Io, Some(503)));
    assert!(error.hint_text().unwrap().contains("goes on from it"), "{error:?}");
    server.heal();
    server.fault("decode.bin", Fault::Status(429, "Retry-After: 3600\r\n".to_owned()), 1);
    let error = pull(&hub, "o/n").unwrap_err();
    assert_eq!(error.hint_text(), Some("it asks to wait 3600 s"));
    server.fault("api/models", Fault::Status(502, String::new()), 1);
    pull(&hub, "o/n").unwrap();
}

#[test]
fn a_wrong_hash_leaves_nothing_under_a_name() {
    let (server, cache, hub) = started(large());
    server.fault("decode.bin", Fault::WrongBytes, 1);
    let error = pull(&hub, "o/n").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Artifact);
    let etag = large().files[1].etag();
    assert!(error.message().starts_with("decode.bin: sha256 "), "{error}");
    assert!(error.message().ends_with(&format!(", expected {etag}")), "{error}");
    let names = tree(cache.path());
    assert!(
        !names.iter().any(|name| name.ends_with(&etag) || name.contains("snapshots")),
        "{names:?}"
    );
    pull(&hub, "o/n").unwrap();
}

#[test]
fn what_another_left_damaged_is_fetched_once_more() {
    let (_server, cache, hub) = started(large());
    let blobs = cache.path().join("models--o--n/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", large().files[1].etag()));
    for left in [vec![0; 1000], vec![0; 2 << 20], vec![0; 1 << 20]] {
        std::fs::write(&partial, left).unwrap();
        let pulled = pull(&hub, "o/n").unwrap();
        assert_eq!(std::fs::read(pulled.path.join("decode.bin")).unwrap(), weights(1 << 20, 1));
        hub.cache().remove(&crate::name("o/n")).unwrap();
        std::fs::create_dir_all(&blobs).unwrap();
    }
}

#[test]
fn a_length_that_lies_is_refused() {
    let cases: [(Repo, Option<Fault>, &str); 4] = [
        (large(), Some(Fault::Longer(5)), "the hub sends 1048581 bytes, expected 1048576"),
        (large().claiming("decode.bin", 5), None, "the hub sends 1048576 bytes, expected 5"),
        (
            large().claiming("decode.bin", 1 << 21),
            None,
            "the hub sends 1048576 bytes, expected 2097152",
        ),
        (large().claiming("m.json", 0), None, "m.json: git blob "),
    ];
    for (repo, fault, expected) in cases {
        let (server, cache) = (Server::start([repo]), tempfile::tempdir().unwrap());
        fault.into_iter().for_each(|fault| server.fault("decode.bin", fault, 1));
        let error = pull(&Hub::new(options(&server, cache.path())), "o/n").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact, "{error}");
        assert!(error.message().contains(expected), "{error}");
    }
}

#[test]
fn nobody_waits_for_a_silent_hub_once_it_is_cancelled() {
    let (server, cache) = (Server::start([large()]), tempfile::tempdir().unwrap());
    server.fault("decode.bin", Fault::Stall(1000), 1);
    let hub = Hub::new(options(&server, cache.path()).idle(Duration::from_secs(86_400)));
    let selection = select(&hub, "o/n").unwrap();
    let cancel = CancelToken::new();
    let report = |progress: qhx_hub::DownloadProgress<'_>| {
        if matches!(progress, qhx_hub::DownloadProgress::Fetched(1000)) {
            cancel.cancel();
        }
    };
    let error = hub.download(&selection, &report, &cancel).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(tree(cache.path()).iter().any(|name| name.ends_with(".incomplete")));
}

#[test]
fn two_that_fetch_the_same_fetch_it_once() {
    let (server, cache) = (Server::start([repo()]), tempfile::tempdir().unwrap());
    server.fault("decode.bin", Fault::Slow(30_000, Duration::from_millis(5)), 1);
    let pulls: Vec<_> = std::thread::scope(|scope| {
        let run = || pull(&Hub::new(options(&server, cache.path())), "o/n/v81").unwrap();
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(server.sent(), pulls[0].bytes);
    assert_eq!(pulls.iter().map(|pulled| pulled.fetched_bytes).sum::<u64>(), pulls[0].bytes);
}
