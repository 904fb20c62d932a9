//! Fetched files are found, looked at again and removed.

use std::fs::{File, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use qhx_base::{CancelToken, ErrorKind};
use qhx_hub::{Cache, Kind};
use qhx_hub_server::{Fault, Repo};

use crate::{find, is_manifest, name, pull, repo, started, tree};

#[test]
fn names_lead_to_folders_and_manifests() {
    let (_server, _cache, hub) = started(repo());
    assert_eq!(find(&hub, "o/n").unwrap(), None);
    let pulled = pull(&hub, "o/n/v81").unwrap();
    for (text, inner) in [
        ("o/n", ""),
        ("o/n@main", ""),
        ("o/n/v81", ""),
        ("o/n/v81/m.json", "m.json"),
        ("o/n/v81/m", "m"),
        ("o/n/v81/tables", "tables"),
    ] {
        let found = find(&hub, text).unwrap().expect(text);
        assert_eq!(
            found.path,
            pulled.path.join(inner).components().collect::<std::path::PathBuf>(),
            "{text}"
        );
    }
    for text in ["o/n/v79", "o/n@v2", "o/other", "o/n/v81/absent"] {
        assert_eq!(find(&hub, text).unwrap(), None, "{text}");
    }
    pull(&hub, "o/n/v79").unwrap();
    let error = find(&hub, "o/n").unwrap_err();
    assert_eq!(error.message(), "o/n: which bundle? There is v79, v81");
}

/// Changes a byte of a file, and its time of change.
fn damage(file: &Path) {
    let mut open = OpenOptions::new().write(true).open(file).expect("what the test needs");
    open.seek(SeekFrom::Start(5)).expect("what the test needs");
    open.write_all(b"?").expect("what the test needs");
}

#[test]
fn a_file_that_changed_is_noticed_when_it_is_opened() {
    let (_server, _cache, hub) = started(repo());
    let file = pull(&hub, "o/n/v81").unwrap().path.join("decode.bin");
    // A cache that was copied: another time, the same bytes.
    let open = File::options().write(true).open(&file).unwrap();
    open.set_modified(SystemTime::now() - Duration::from_secs(86_400)).unwrap();
    find(&hub, "o/n").unwrap().unwrap();
    damage(&file);
    let error = find(&hub, "o/n").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("decode.bin: sha256 "), "{error}");
    assert_eq!(error.hint_text(), Some("fetch it again: qhx pull o/n/v81"));
    pull(&hub, "o/n/v81").unwrap();
    find(&hub, "o/n").unwrap().unwrap();
    open.set_len(7).unwrap();
    std::fs::write(&file, "short").unwrap();
    let error = find(&hub, "o/n").unwrap_err();
    assert!(error.message().ends_with("decode.bin: 5 bytes, expected 300000"), "{error}");
    std::fs::remove_file(&file).unwrap();
    assert!(find(&hub, "o/n").unwrap_err().message().ends_with("decode.bin: missing"));
    assert_eq!(hub.cache().list(is_manifest).unwrap()[0].complete, Some(false));
    pull(&hub, "o/n/v81").unwrap();
    find(&hub, "o/n").unwrap().unwrap();
}

#[test]
fn files_are_looked_at_again() {
    let (_server, cache, hub) = started(repo());
    let folder = pull(&hub, "o/n/v81").unwrap().path;
    let verify = || {
        let checks =
            Cache::verify(&folder, &CancelToken::new(), |_| false, |_| Ok(())).unwrap().unwrap();
        checks.into_iter().map(|check| (check.path, check.message)).collect::<Vec<_>>()
    };
    let paths: Vec<_> = verify().into_iter().map(|(path, _)| path).collect();
    assert_eq!(paths, ["v81/decode.bin", "v81/m.json", "v81/tables/embed.bin"]);
    assert!(verify().iter().all(|(_, message)| message.is_none()));
    damage(&folder.join("decode.bin"));
    std::fs::remove_file(folder.join("m.json")).unwrap();
    let messages: Vec<_> = verify().into_iter().map(|(_, message)| message).collect();
    assert!(messages[0].as_ref().unwrap().starts_with("sha256 "), "{messages:?}");
    assert_eq!(messages[1..], [Some("missing".to_owned()), None]);
    assert_eq!(
        Cache::verify(cache.path(), &CancelToken::new(), |_| false, |_| Ok(())).unwrap(),
        None
    );
}

/// A cache as another tool leaves it, without notes.
fn forget(cache: &Path) {
    std::fs::remove_dir_all(cache.join("models--o--n/.qhx")).expect("what the test needs");
}

#[test]
fn what_other_tools_fetched_is_found_and_taken_over() {
    let (server, cache, hub) = started(repo());
    let pulled = pull(&hub, "o/n/v81").unwrap();
    forget(cache.path());
    let found = find(&hub, "o/n").unwrap().unwrap();
    assert_eq!((found.path, found.kind), (pulled.path.clone(), Kind::Bundle));
    assert!(find(&hub, "o/n/v81/m").unwrap().is_some());
    let listed = hub.cache().list(is_manifest).unwrap();
    assert_eq!((listed[0].name.as_str(), listed[0].complete), ("o/n/v81", None));
    let sent = server.sent();
    assert_eq!(pull(&hub, "o/n/v81").unwrap().fetched_bytes, 0);
    assert_eq!(server.sent(), sent);
    // Taken over only once it was compared.
    forget(cache.path());
    damage(&pulled.path.join("decode.bin"));
    assert_eq!(pull(&hub, "o/n/v81").unwrap().fetched_bytes, 300_000);
}

#[test]
fn a_branch_that_others_moved_is_found_where_it_was() {
    let (_server, cache, hub) = started(repo());
    let pulled = pull(&hub, "o/n/v81").unwrap();
    let root = cache.path().join("models--o--n");
    let other = root.join("snapshots").join("b".repeat(40));
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("README.md"), "").unwrap();
    std::fs::write(root.join("refs/main"), "b".repeat(40)).unwrap();
    assert_eq!(find(&hub, "o/n").unwrap().unwrap().path, pulled.path);
}

#[test]
fn what_is_removed_leaves_what_others_need() {
    let (server, cache, hub) = started(repo());
    pull(&hub, "o/n/v79").unwrap();
    pull(&hub, "o/n/v81").unwrap();
    let removed = hub.cache().remove(&name("o/n/v81")).unwrap();
    // Its tables are those of v79, too.
    assert!((300_000..301_000).contains(&removed.bytes), "{removed:?}");
    assert!(find(&hub, "o/n/v79").unwrap().is_some());
    assert_eq!(find(&hub, "o/n/v81").unwrap(), None);
    let mut new = repo();
    new.commit = "b".repeat(40);
    server.publish(new);
    pull(&hub, "o/n/v79").unwrap();
    let old = format!("o/n@{}", "a".repeat(40));
    assert_eq!(hub.cache().remove(&name(&old)).unwrap().bytes, 0, "the same contents");
    assert!(find(&hub, "o/n/v79").unwrap().is_some());
    hub.cache().remove(&name("o/n/v79")).unwrap();
    assert!(tree(cache.path()).is_empty(), "{:?}", tree(cache.path()));
    pull(&hub, "o/n/v79").unwrap();
    assert!(hub.cache().remove(&name("o/n")).unwrap().bytes > 400_000);
    let error = hub.cache().remove(&name("o/n")).unwrap_err();
    assert_eq!(error.message(), "o/n: nothing of it is there");
}

#[test]
fn folders_of_modules_come_with_their_checkpoint() {
    let modules = r#"[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]"#;
    let files =
        ["config.json", "1_Pooling/config.json", "2_Dense/config.json", "3_Other/config.json"];
    let repo = files.iter().fold(Repo::new("o/c", 'a'), |repo, path| repo.file(path, "{}"));
    let repo = repo
        .file("modules.json", modules)
        .lfs("pytorch_model.bin", vec![7; 2000])
        .lfs("2_Dense/pytorch_model.bin", vec![8; 2000]);
    let (server, _cache, hub) = started(repo);
    let cancel = CancelToken::new();
    let listing = hub.resolve(&name("o/c"), &cancel).unwrap();
    let chosen = hub.checkpoint(&listing, qhx_hub::CheckpointFiles::All, &cancel).unwrap();
    let pulled = hub.download(&chosen, &|_| {}, &cancel).unwrap();
    for path in
        ["modules.json", "pytorch_model.bin", "2_Dense/pytorch_model.bin", files[1], files[2]]
    {
        assert!(pulled.path.join(path).is_file(), "{path}");
    }
    assert!(!pulled.path.join("3_Other").exists());
    let asked =
        server.requests().into_iter().filter(|request| request.path.ends_with("modules.json"));
    assert_eq!(asked.count(), 1);
}

#[test]
fn what_a_broken_download_left_is_listed_and_removed() {
    let (server, cache, hub) = started(repo());
    pull(&hub, "o/n/v79").unwrap();
    assert_eq!(hub.cache().unfinished().unwrap(), []);
    server.fault("v81/decode.bin", Fault::Cut(70_000), 1);
    server.fault("v81/decode.bin", Fault::Status(502, String::new()), 9);
    pull(&hub, "o/n/v81").unwrap_err();
    let left = hub.cache().unfinished().unwrap();
    assert!(left.len() == 1 && left[0].name == "o/n", "{left:?}");
    assert!((70_000..71_000).contains(&left[0].bytes), "{left:?}");
    let removed = hub.cache().remove(&name("o/n/v81")).unwrap();
    assert_eq!((removed.bytes, removed.commits.len()), (left[0].bytes, 0));
    assert_eq!(hub.cache().unfinished().unwrap(), []);
    assert!(!tree(cache.path()).iter().any(|name| name.ends_with(".incomplete")));
    assert!(find(&hub, "o/n/v79").unwrap().is_some());
    assert_eq!(hub.cache().remove(&name("o/n/v81")).unwrap_err().kind(), ErrorKind::Usage);
}

#[test]
fn checkpoints_are_listed_and_found() {
    let repo =
        Repo::new("o/c", 'a').file("config.json", "{}").lfs("model.safetensors", vec![7; 2000]);
    let (_server, _cache, hub) = started(repo);
    let listing = hub.resolve(&name("o/c"), &CancelToken::new()).unwrap();
    let selection =
        qhx_hub::Selection::checkpoint(&listing, qhx_hub::CheckpointFiles::All, &[]).unwrap();
    let pulled = hub.download(&selection, &|_| {}, &CancelToken::new()).unwrap();
    let found = find(&hub, "o/c").unwrap().unwrap();
    assert_eq!((found.kind, found.path), (Kind::Checkpoint, pulled.path));
    assert_eq!(hub.cache().list(is_manifest).unwrap()[0].kind, Kind::Checkpoint);
}
