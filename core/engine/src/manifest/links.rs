//! The files of a bundle whose manifest was read: links, and files that are exchanged while it is open.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use crate::Manifest;
use qhx_base::artifacts::{FirstSeen, Mapped};
use qhx_base::{Error, ErrorKind};
use qhx_exec::backend::ContextSource;
use qhx_text::Tokenizer;

const MANIFEST: &str = r#"{
    "schema_version": 1, "artifacts_root": "files",
    "artifacts": {"contexts": {"decode": {"bin": "decode.bin"}}},
    "plan": {"steps": [{"host": "x"}]}
}"#;

/// A bundle with a file, and a secret beside the bundle.
fn bundle() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (root, secret) = (dir.path().join("bundle"), dir.path().join("secret"));
    std::fs::create_dir_all(root.join("files")).unwrap();
    std::fs::create_dir(&secret).unwrap();
    std::fs::write(secret.join("decode.bin"), b"secret").unwrap();
    std::fs::write(root.join("files/decode.bin"), b"public").unwrap();
    std::fs::write(root.join("m.json"), MANIFEST).unwrap();
    (dir, root, secret)
}

fn refused(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Manifest, "{error}");
    assert!(error.message().contains("a link out of"), "{error}");
}

#[test]
fn an_artifacts_root_that_links_out_of_the_bundle_is_refused() {
    let (_dir, root, secret) = bundle();
    let manifest = Manifest::load(&root).unwrap();
    let mut artifacts = manifest.open_artifacts();
    assert_eq!(artifacts.open("/p", "decode.bin").unwrap().bytes(), b"public");
    // Exchanged after the manifest was read.
    std::fs::rename(root.join("files"), root.join("moved")).unwrap();
    symlink(&secret, root.join("files")).unwrap();
    refused(&manifest.open_artifacts().open("/p", "decode.bin").unwrap_err());
    let error = Manifest::load(&root).unwrap_err();
    refused(&error);
    assert!(error.message().contains("/artifacts_root"), "{error}");
    // A folder that the user names is the user's choice.
    let manifest = Manifest::load_with_root(&root, Some(&secret)).unwrap();
    let mut artifacts = manifest.open_artifacts();
    assert_eq!(artifacts.open("/p", "decode.bin").unwrap().bytes(), b"secret");
    // A link within the bundle is one, too.
    std::fs::remove_file(root.join("files")).unwrap();
    symlink("moved", root.join("files")).unwrap();
    Manifest::load(&root).unwrap();
}

#[test]
fn a_file_exchanged_between_check_and_opening_is_refused() {
    let (_dir, root, secret) = bundle();
    let manifest = Manifest::load(&root).unwrap();
    let source = manifest.context_source(&manifest.open_artifacts(), "decode").unwrap();
    let path = source.binary.clone().unwrap();
    assert_eq!(source.open(&path).unwrap().bytes(), b"public");
    std::fs::remove_file(&path).unwrap();
    symlink(secret.join("decode.bin"), &path).unwrap();
    refused(&source.open(&path).unwrap_err());
    // Files that are no bundle's have no bounds.
    let free = ContextSource { within: None, seen: FirstSeen::default(), ..source };
    assert_eq!(free.open(&path).unwrap().bytes(), b"secret");
}

#[test]
fn a_file_replaced_by_renaming_is_refused_by_name() {
    let (_dir, root, secret) = bundle();
    let manifest = Manifest::load(&root).unwrap();
    let mut artifacts = manifest.open_artifacts();
    let source = manifest.context_source(&artifacts, "decode").unwrap();
    let path = source.binary.clone().unwrap();
    assert_eq!(source.open(&path).unwrap().bytes(), b"public");
    assert_eq!(source.open(&path).unwrap().bytes(), b"public", "the same file again");
    // Of the same length, so that nothing but its identity gives it away.
    std::fs::rename(secret.join("decode.bin"), &path).unwrap();
    let again = [
        source.clone().open(&path).unwrap_err(),
        manifest.context_source(&artifacts, "decode").unwrap().open(&path).unwrap_err(),
        artifacts.open("/p", "decode.bin").unwrap_err(),
    ];
    for error in again {
        assert_eq!(error.kind(), ErrorKind::Artifact, "{error}");
        for part in ["decode.bin", "replaced or changed", "found 6 bytes", "expected 6 bytes"] {
            assert!(error.message().contains(part), "{part}: {error}");
        }
        assert!(error.hint_text().is_some_and(|hint| hint.contains("open the bundle again")));
    }
    // Who opens the bundle again gets what is there now.
    let mut fresh = manifest.open_artifacts();
    assert_eq!(fresh.open("/p", "decode.bin").unwrap().bytes(), b"secret");
}

#[test]
fn a_fifo_in_the_place_of_a_file_is_named_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    type Call = fn(&Path) -> Error;
    let calls: [(Call, ErrorKind); 3] = [
        (|path| Mapped::open(path).unwrap_err(), ErrorKind::Artifact),
        (|path| Tokenizer::from_file(path).unwrap_err(), ErrorKind::Artifact),
        (|path| Manifest::load(path).unwrap_err(), ErrorKind::Manifest),
    ];
    for (call, kind) in calls {
        let (send, receive) = mpsc::channel();
        let given = fifo.clone();
        std::thread::spawn(move || send.send(call(&given)));
        let error = receive.recv_timeout(Duration::from_secs(20)).expect("an answer");
        assert!(error.message().contains("a FIFO"), "{error}");
        assert_eq!(error.kind(), kind);
    }
}

#[test]
fn a_bundle_in_a_cache_of_a_hub_is_bounded_by_its_repository() {
    let dir = tempfile::tempdir().unwrap();
    let repository = dir.path().join("models--o--n");
    let folder = repository.join("snapshots").join("a".repeat(40)).join("v81");
    for folder in [folder.join("files"), repository.join("blobs")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(repository.join("blobs/1"), MANIFEST).unwrap();
    std::fs::write(repository.join("blobs/2"), b"public").unwrap();
    std::fs::write(dir.path().join("decode.bin"), b"secret").unwrap();
    symlink("../../../blobs/1", folder.join("m.json")).unwrap();
    let decode = folder.join("files/decode.bin");
    symlink("../../../../blobs/2", &decode).unwrap();
    let manifest = Manifest::load(&folder).unwrap();
    assert_eq!(manifest.open_artifacts().open("/p", "decode.bin").unwrap().bytes(), b"public");
    std::fs::remove_file(&decode).unwrap();
    symlink("../../../../../decode.bin", &decode).unwrap();
    refused(&manifest.open_artifacts().open("/p", "decode.bin").unwrap_err());
}
