//! Layout of fetched files.

use qhx_hub::Kind;

use crate::{find, is_manifest, pull, repo, started, tree};

#[cfg(unix)]
#[test]
fn files_lie_as_the_tools_of_the_hub_lay_them() {
    let (_server, cache, hub) = started(repo());
    let pulled = pull(&hub, "o/n/v81").unwrap();
    let files = repo().files;
    let etag = |path: &str| files.iter().find(|file| file.path == path).unwrap().etag();
    let [m, decode, embed] = ["v81/m.json", "v81/decode.bin", "v81/tables/embed.bin"].map(etag);
    let commit = "a".repeat(40);
    let root = "models--o--n";
    let mut expected = vec![
        format!("{root}/refs/main"),
        format!("{root}/snapshots/{commit}/v81/decode.bin -> ../../../blobs/{decode}"),
        format!("{root}/snapshots/{commit}/v81/m.json -> ../../../blobs/{m}"),
        format!("{root}/snapshots/{commit}/v81/tables/embed.bin -> ../../../../blobs/{embed}"),
    ];
    expected.extend([&m, &decode, &embed].map(|blob| format!("{root}/blobs/{blob}")));
    expected.sort();
    assert_eq!(tree(cache.path()), expected);
    assert_eq!(std::fs::read_to_string(cache.path().join(root).join("refs/main")).unwrap(), commit);
    assert_eq!(pulled.path, cache.path().join(root).join("snapshots").join(&commit).join("v81"));
    assert_eq!((pulled.kind, pulled.files, pulled.commit), (Kind::Bundle, 3, commit));
    let decode = files.iter().find(|file| file.path == "v81/decode.bin").unwrap();
    assert_eq!(std::fs::read(pulled.path.join("decode.bin")).unwrap(), decode.bytes);
}

#[test]
fn what_is_there_is_not_fetched_again() {
    let (server, _cache, hub) = started(repo());
    pull(&hub, "o/n/v81").unwrap();
    let sent = server.sent();
    assert_eq!(pull(&hub, "o/n/v81").unwrap().fetched_bytes, 0);
    let other = pull(&hub, "o/n/v79").unwrap();
    // The tables have one content.
    assert_eq!(other.fetched_bytes, server.sent() - sent);
    assert!(other.bytes - other.fetched_bytes == 100_000, "{other:?}");
    let listed = hub.cache().list(is_manifest).unwrap();
    let names: Vec<_> = listed.iter().map(|local| local.name.as_str()).collect();
    assert_eq!(names, ["o/n/v79", "o/n/v81"]);
    assert!(listed.iter().all(|local| local.complete == Some(true)), "{listed:?}");
}

#[test]
fn a_new_revision_gets_a_folder_of_its_own() {
    let (server, _cache, hub) = started(repo().tagged("v1"));
    let old = pull(&hub, "o/n@v1/v81").unwrap();
    let mut new = repo();
    new.commit = "b".repeat(40);
    new.files.iter_mut().for_each(|file| file.bytes[1] = b'?');
    server.publish(new);
    let old_bytes = std::fs::read(old.path.join("decode.bin")).unwrap();
    let new = pull(&hub, "o/n/v81").unwrap();
    assert_ne!(new.path, old.path);
    assert_ne!(std::fs::read(new.path.join("decode.bin")).unwrap(), old_bytes);
    assert_eq!(std::fs::read(old.path.join("decode.bin")).unwrap(), old_bytes, "not replaced");
    assert_eq!(find(&hub, "o/n").unwrap().unwrap().path, new.path);
    assert_eq!(find(&hub, "o/n@v1").unwrap().unwrap().path, old.path);
    let pinned = format!("o/n@{}", "a".repeat(40));
    assert_eq!(find(&hub, &pinned).unwrap().unwrap().path, old.path);
}
