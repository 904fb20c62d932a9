//! Refused downloads, and the reasons.

use qhx_base::ErrorKind;
use qhx_hub::Hub;
use qhx_hub_server::{CERTIFICATE, Fault, Repo, Server};

use crate::{name, options, pull, repo, started, tree};

#[test]
fn a_token_stays_with_the_hub() {
    let secret = || Some("hf_secret".to_owned());
    let storage = Server::start([repo()]);
    let (server, cache) =
        (Server::start([repo().gated("hf_secret")]), tempfile::tempdir().unwrap());
    server.fault("decode.bin", Fault::Redirect(storage.endpoint()), 1);
    let hub = Hub::new(options(&server, cache.path()).token(secret()));
    pull(&hub, "o/n/v81").unwrap();
    let elsewhere = storage.requests();
    assert_eq!(elsewhere.len(), 1);
    assert_eq!(elsewhere[0].header("authorization"), None, "{elsewhere:?}");
    let here = server.requests();
    assert!(here.iter().all(|request| request.header("authorization") == Some("Bearer hf_secret")));
    // A link of a storage that is refused there comes from the hub again.
    storage.fault("decode.bin", Fault::Status(403, String::new()), 1);
    server.fault("decode.bin", Fault::Redirect(storage.endpoint()), 2);
    pull(&hub, "o/n/v79").unwrap();
    assert_eq!(format!("{:?}", hub.options()).matches("hf_secret").count(), 0);
}

#[test]
fn a_hub_over_tls_is_one_that_is_trusted() {
    let (server, folder) = (Server::start([repo().gated("t")]), tempfile::tempdir().unwrap());
    let endpoint = server.tls_endpoint();
    let over_tls = || options(&server, folder.path()).endpoint(&endpoint).token("t".to_owned());
    let untrusted = pull(&Hub::new(over_tls()), "o/n/v81").unwrap_err();
    assert!(untrusted.message().contains("invalid peer certificate"), "{untrusted}");
    assert!(
        untrusted.hint_text().is_some_and(|hint| hint.contains("SSL_CERT_FILE")),
        "{untrusted:?}"
    );
    assert!(server.requests().is_empty(), "nothing is asked of a hub that is not trusted");

    let file = folder.path().join("authorities.pem");
    std::fs::write(&file, format!("a comment\n{CERTIFICATE}")).unwrap();
    let hub = Hub::new(over_tls().authorities(file.clone()));
    assert_eq!(pull(&hub, "o/n/v81").unwrap().fetched_bytes, server.sent());
    // The host of a certificate is the one that was asked.
    let elsewhere = endpoint.replace("localhost", "127.0.0.1");
    let hub = Hub::new(over_tls().endpoint(elsewhere).authorities(file.clone()));
    let error = pull(&hub, "o/n/v79").unwrap_err();
    assert!(error.message().contains("certificate"), "{error}");

    for text in ["", "no certificate"] {
        std::fs::write(&file, text).unwrap();
        let error = pull(&Hub::new(over_tls().authorities(file.clone())), "o/n/v79").unwrap_err();
        assert!(
            error.message().contains("authorities.pem: there is no certificate in it"),
            "{error}"
        );
    }
}

#[test]
fn redirects_on_the_hub_keep_the_token() {
    let (server, cache) = (Server::start([repo().gated("t")]), tempfile::tempdir().unwrap());
    server.fault("decode.bin", Fault::Redirect(String::new()), 1);
    let hub = Hub::new(options(&server, cache.path()).token("t".to_owned()));
    pull(&hub, "o/n/v81").unwrap();
    server.fault("decode.bin", Fault::Redirect(String::new()), 99);
    let error = pull(&hub, "o/n/v79").unwrap_err();
    assert!(error.message().contains("more than 10 redirects"), "{error}");
}

#[test]
fn a_gated_repository_says_what_to_do() {
    let (server, cache) = (Server::start([repo().gated("right")]), tempfile::tempdir().unwrap());
    let ask = |token: Option<&str>| {
        let hub = Hub::new(options(&server, cache.path()).token(token.map(str::to_owned)));
        pull(&hub, "o/n/v81").unwrap_err()
    };
    let (without, wrong) = (ask(None), ask(Some("wrong")));
    assert_eq!((without.code(), wrong.code()), (Some(401), Some(403)));
    let hint = without.hint_text().unwrap();
    assert!(
        hint.starts_with("accept the terms") && hint.ends_with("set HF_TOKEN to a token of yours"),
        "{hint}"
    );
    assert!(
        wrong.hint_text().unwrap().ends_with("the token that is given may not read it"),
        "{wrong:?}"
    );
    assert!(!wrong.report().to_string().contains("wrong"));
}

#[test]
fn what_is_not_there_is_a_mistake_of_the_name() {
    let (server, cache, hub) = started(repo());
    for text in ["o/other", "o/n@v9"] {
        let error = pull(&hub, text).unwrap_err();
        assert_eq!((error.kind(), error.code()), (ErrorKind::Usage, Some(404)), "{error}");
    }
    let error =
        pull(&Hub::new(options(&server, cache.path()).endpoint("http://127.0.0.1:1")), "o/n");
    let error = error.unwrap_err();
    assert!(error.hint_text().unwrap().starts_with("is there a network?"), "{error:?}");
    server.fault("api/models", Fault::Status(200, String::new()), 1);
    let error = pull(&hub, "o/n").unwrap_err();
    assert!(error.message().starts_with("the list of files of o/n: "), "{error}");
}

#[test]
fn programs_in_the_place_of_data_are_refused() {
    let mut program = b"\x7fELF".to_vec();
    program.resize(10_000, 7);
    let repo = Repo::new("o/n", 'a').file("m.json", "{}").lfs("decode.bin", program);
    let (server, cache) = (Server::start([repo]), tempfile::tempdir().unwrap());
    let error = pull(&Hub::new(options(&server, cache.path())), "o/n").unwrap_err();
    assert_eq!(error.message(), "decode.bin: a program (ELF), expected data");
    assert!(!tree(cache.path()).iter().any(|name| name.contains("snapshots")));
}

#[test]
fn room_is_asked_for_first() {
    let (server, cache) = (Server::start([repo()]), tempfile::tempdir().unwrap());
    let hub = Hub::new(options(&server, cache.path()).free_space(|_| Ok(16 << 20)));
    let error = pull(&hub, "o/n/v81").unwrap_err();
    assert!(error.message().ends_with("17 MiB are needed, 16 MiB are free"), "{error}");
    assert_eq!(server.sent(), 0);
    // What is there needs none.
    pull(&Hub::new(options(&server, cache.path())), "o/n/v81").unwrap();
    pull(&hub, "o/n/v81").unwrap();
}

#[test]
fn offline_nobody_is_asked() {
    let (server, cache) = (Server::start([repo()]), tempfile::tempdir().unwrap());
    let offline = Hub::new(options(&server, cache.path()).offline(true));
    let error = pull(&offline, "o/n/v81").unwrap_err();
    assert_eq!(error.message(), "o/n/v81: it is not there, and nothing is fetched offline");
    pull(&Hub::new(options(&server, cache.path())), "o/n/v81").unwrap();
    let asked = server.requests().len();
    assert!(crate::find(&offline, "o/n").unwrap().is_some());
    offline.cache().remove(&name("o/n")).unwrap();
    assert_eq!(server.requests().len(), asked);
}
