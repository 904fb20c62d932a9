//! Requests: redirects, the token and which failures another attempt may mend.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use qhx_base::{Error, ErrorKind, Result, bail, error, files};
use rustls::crypto::CryptoProvider;
use ureq::http::{HeaderMap, Response, StatusCode, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy, SendBody};

use crate::options::HubOptions;

/// Redirects of one request that are followed.
const MAX_REDIRECTS: usize = 10;

/// Longest time to find a host and connect to it.
const CONNECT: Duration = Duration::from_secs(20);

/// Longest file of authorities.
const MAX_AUTHORITIES: u64 = 16 << 20;

/// Longest that a hub's wish to wait is granted.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Another attempt fails likewise.
    Final(Error),
    /// Another attempt may succeed, after this time if the hub said so.
    Passing(Error, Option<Duration>),
    /// Nobody is there: to begin with it is not worth another attempt, within a download it is.
    Unreachable(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl Failure {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Final(error) | Self::Passing(error, _) | Self::Unreachable(error) => error,
        }
    }
}

/// Asks a hub.
#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    endpoint: Uri,
    token: Option<String>,
}

impl Client {
    pub(crate) fn new(options: &HubOptions) -> Result<Self> {
        let endpoint = parse(&options.endpoint, &options.endpoint)?;
        if endpoint.scheme_str() == Some("https") {
            check_processor()?;
        }
        let mut tls =
            TlsConfig::builder().unversioned_rustls_crypto_provider(Arc::clone(&PROVIDER));
        if let Some(file) = &options.authorities {
            tls = tls.root_certs(authorities(file)?);
        }
        let agent = Agent::config_builder()
            .tls_config(tls.build())
            .proxy(proxy(options)?)
            // Redirects are followed here, without the token where they lead elsewhere.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(concat!("qhx/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(options.idle))
            .timeout_per_write(Some(options.idle))
            .build()
            .new_agent();
        Ok(Self { agent, endpoint, token: options.token.clone() })
    }

    pub(crate) fn agent(&self) -> &Agent {
        &self.agent
    }

    /// The hub's URL with this path, whose parts are encoded.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.endpoint.to_string().trim_end_matches('/'))
    }

    /// Asks for a URL, from the byte `from` on. Returns what succeeds, and 416.
    pub(crate) fn get(&self, url: &str, from: Option<u64>) -> Result<Response<Body>, Failure> {
        let mut uri = parse(url, url)?;
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.agent.get(uri.clone());
            if let Some(from) = from {
                request = request.header("Range", format!("bytes={from}-"));
            }
            if let Some(token) = self.token.as_ref().filter(|_| self.may_have_token(&uri)) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| failed(&uri, e))?;
            if !response.status().is_redirection() {
                return self.judged(&uri, response);
            }
            uri = redirect(&uri, response.headers())?;
        }
        Err(error!(Io, "{}: more than {MAX_REDIRECTS} redirects", shown(&uri)).into())
    }

    /// Sends a body to the hub, or to a URL that it gave, and returns what it replies. A signed URL gets no token.
    pub(crate) fn post(
        &self,
        url: &str,
        media_type: &str,
        body: &[u8],
        signed: bool,
    ) -> Result<Response<Body>, Failure> {
        let uri = parse(url, "an address that the hub gave")?;
        let mut request = self.agent.post(uri.clone());
        request = request.header("Content-Type", media_type).header("Accept", media_type);
        let token = self.token.as_ref().filter(|_| !signed && self.may_have_token(&uri));
        if let Some(token) = token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let response = request.send(body).map_err(|e| failed(&uri, e))?;
        self.judged(&uri, response)
    }

    /// Sends `length` bytes to a URL that the hub gave. It is signed: it gets the headers that came with it, and no
    /// token.
    pub(crate) fn put(
        &self,
        url: &str,
        headers: &BTreeMap<String, String>,
        body: &mut dyn Read,
        length: u64,
    ) -> Result<Response<Body>, Failure> {
        let uri = parse(url, "an address that the hub gave")?;
        if uri.scheme_str() == Some("https") {
            check_processor()?;
        } else if self.endpoint.scheme_str() == Some("https") {
            return Err(error!(Io, "{}: the hub gave an address without TLS", shown(&uri)).into());
        }
        let mut request = self.agent.put(uri.clone()).header("Content-Length", length.to_string());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let response = request.send(SendBody::from_reader(body)).map_err(|e| failed(&uri, e))?;
        self.judged(&uri, response)
    }

    /// True if there is a token that the endpoint gets.
    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some() && self.may_have_token(&self.endpoint)
    }

    /// The token is the endpoint's: for no other host, and for nobody who listens.
    fn may_have_token(&self, uri: &Uri) -> bool {
        let host = uri.host().unwrap_or_default();
        let private = uri.scheme_str() == Some("https")
            || ["localhost", "127.0.0.1", "[::1]"].contains(&host);
        private && is_same_origin(uri, &self.endpoint)
    }

    fn judged(&self, uri: &Uri, response: Response<Body>) -> Result<Response<Body>, Failure> {
        let status = response.status();
        if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(response);
        }
        let code = u64::from(status.as_u16());
        let error = |what: &str| error!(Io, "{}: {what} (HTTP {code})", shown(uri)).with_code(code);
        let said = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let elsewhere = !is_same_origin(uri, &self.endpoint);
        match status.as_u16() {
            // A link of a storage that has expired: the hub gives another one.
            401 | 403 if elsewhere => Err(Failure::Passing(error("access is refused"), None)),
            401 | 403 => Err(self.refused(error("access is refused"), said("x-error-code")).into()),
            404 => {
                let what = match said("x-error-code") {
                    Some("RevisionNotFound") => "there is no such revision",
                    Some("EntryNotFound") => "there is no such file or repository",
                    _ => "there is no such repository",
                };
                let hint = "compare the name with the repository's page; a private one needs a token: set HF_TOKEN";
                Err(error(what).with_kind(ErrorKind::Usage).hint(hint).into())
            }
            429 => {
                let wait = said("retry-after").and_then(|text| text.trim().parse().ok());
                let wait = wait.map(Duration::from_secs);
                let error = error("the hub has too many requests");
                match wait.filter(|wait| *wait > MAX_WAIT) {
                    Some(wait) => {
                        Err(error.hint(format!("it asks to wait {} s", wait.as_secs())).into())
                    }
                    None => Err(Failure::Passing(error, wait)),
                }
            }
            408 | 425 | 500 | 502 | 503 | 504 => {
                Err(Failure::Passing(error("the hub fails for the moment"), None))
            }
            _ => Err(error("not what was asked for").into()),
        }
    }

    fn refused(&self, error: Error, code: Option<&str>) -> Error {
        let token = match &self.token {
            Some(_) if !self.may_have_token(&self.endpoint) => {
                "the token is sent over https or loopback only"
            }
            Some(_) => "the token that is given may not read it",
            None => "set HF_TOKEN to a token of yours",
        };
        match code {
            Some("GatedRepo") => error.hint(format!(
                "accept the terms on the repository's page at {}; {token}",
                self.endpoint
            )),
            _ => error.hint(format!("the name may be wrong, or the repository private: {token}")),
        }
    }
}

/// One provider, so that connections can be shared.
static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(rustls_graviola::default_provider()));

/// The cryptography is written for processors with these instructions, and would panic on others.
fn check_processor() -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    let (fits, needs) = (
        is_x86_feature_detected!("aes")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("adx")
            && is_x86_feature_detected!("avx2"),
        "AES, PCLMULQDQ, BMI, ADX and AVX2",
    );
    #[cfg(target_arch = "aarch64")]
    let (fits, needs) = (
        std::arch::is_aarch64_feature_detected!("neon")
            && std::arch::is_aarch64_feature_detected!("aes")
            && std::arch::is_aarch64_feature_detected!("pmull")
            && std::arch::is_aarch64_feature_detected!("sha2"),
        "NEON, AES, PMULL and SHA2",
    );
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let (fits, needs) = (false, "x86-64 or AArch64");
    if fits {
        return Ok(());
    }
    Err(error!(Runtime, "https needs a processor with {needs}, which this one has not")
        .hint("fetch the files on another machine, and give their folder"))
}

fn proxy(options: &HubOptions) -> Result<Option<Proxy>> {
    let Some(url) = &options.proxy else { return Ok(None) };
    // The URL may hold a password.
    let wrong = |e: ureq::Error| Error::caused(ErrorKind::Usage, "the proxy's URL", e);
    let given = Proxy::new(url).map_err(wrong)?;
    if given.uri().scheme_str().is_some_and(|scheme| scheme.starts_with("socks")) {
        bail!(Usage, "the proxy's URL: SOCKS is not known here, expected http:// or https://");
    }
    let mut builder = Proxy::builder(given.protocol()).host(given.host()).port(given.port());
    if let Some(user) = given.username() {
        builder = builder.username(user);
    }
    if let Some(password) = given.password() {
        builder = builder.password(password);
    }
    for host in options.no_proxy.iter().flat_map(|hosts| hosts.split(',')).map(str::trim) {
        if !host.is_empty() {
            builder = builder.no_proxy(host);
        }
    }
    // What runs on this machine is not behind a proxy.
    for host in ["localhost", "127.0.0.1", "[::1]"] {
        builder = builder.no_proxy(host);
    }
    builder.build().map(Some).map_err(wrong)
}

fn parse(url: &str, given: &str) -> Result<Uri> {
    let uri: Option<Uri> = url.parse().ok();
    let is_http = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https"));
    uri.filter(|uri| is_http(uri) && uri.host().is_some()).ok_or_else(|| {
        error!(Usage, "{given:?} is no URL of a hub")
            .hint("expected HF_ENDPOINT to be such as https://huggingface.co")
    })
}

fn port(uri: &Uri) -> u16 {
    uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 })
}

fn is_same_origin(a: &Uri, b: &Uri) -> bool {
    let host = |uri: &Uri| uri.host().map(str::to_ascii_lowercase);
    a.scheme() == b.scheme() && host(a) == host(b) && port(a) == port(b)
}

/// Target of a redirect. A redirect from a host with TLS to one without is an error.
fn redirect(from: &Uri, headers: &HeaderMap) -> Result<Uri> {
    let wrong = |what: &str| error!(Io, "{}: a redirect to {what}", shown(from));
    let to = headers.get("location").and_then(|value| value.to_str().ok());
    let to = to.ok_or_else(|| wrong("nowhere"))?;
    let authority = from.authority().map(|authority| authority.as_str()).unwrap_or_default();
    let scheme = from.scheme_str().unwrap_or("https");
    let absolute = if to.starts_with("//") {
        format!("{scheme}:{to}")
    } else if to.starts_with('/') {
        format!("{scheme}://{authority}{to}")
    } else {
        to.to_owned()
    };
    let uri = parse(&absolute, "the target of a redirect").map_err(|_| wrong("what is no URL"))?;
    if scheme == "https" && uri.scheme_str() != Some("https") {
        return Err(wrong("a host without TLS"));
    }
    if uri.scheme_str() == Some("https") {
        check_processor()?;
    }
    Ok(uri)
}

/// The authorities of a file.
fn authorities(file: &Path) -> Result<RootCerts> {
    let text = files::read_text(ErrorKind::Io, file, MAX_AUTHORITIES)
        .map_err(|e| e.hint("SSL_CERT_FILE and REQUESTS_CA_BUNDLE name it"))?;
    let certificates: Vec<_> = parse_pem(text.as_bytes())
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(error!(Io, "{}: there is no certificate in it, expected PEM", file.display())
            .hint("SSL_CERT_FILE and REQUESTS_CA_BUNDLE name it"));
    }
    Ok(RootCerts::new_with_certs(&certificates))
}

/// A URL without its query, which may be a signature.
fn shown(uri: &Uri) -> String {
    let host = uri.host().unwrap_or_default();
    let port = uri.port_u16().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{host}{port}{}", uri.scheme_str().unwrap_or_default(), uri.path())
}

/// Failure of a connection.
fn failed(uri: &Uri, error: ureq::Error) -> Failure {
    use std::io::ErrorKind as Io;
    let what = match &error {
        ureq::Error::HostNotFound => "the host is not found".to_owned(),
        ureq::Error::Io(e) => qhx_base::files::why(e),
        other => other.to_string(),
    };
    let is_tls = match &error {
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) => true,
        // A handshake that fails is an error of reading or writing.
        ureq::Error::Io(e) => e.get_ref().is_some_and(|e| e.is::<rustls::Error>()),
        _ => false,
    };
    let lasting = is_tls || matches!(&error, ureq::Error::BadUri(_) | ureq::Error::Http(_));
    let unreachable = match &error {
        ureq::Error::HostNotFound => true,
        ureq::Error::Io(e) => matches!(e.kind(), Io::ConnectionRefused | Io::NetworkUnreachable),
        _ => false,
    };
    let mut failed = error!(Io, "{}: {what}", shown(uri)).with_source(error);
    if is_tls {
        failed = failed.hint(
            "where an authority of your own signs: SSL_CERT_FILE names a file of its certificate",
        );
    }
    if lasting {
        Failure::Final(failed)
    } else if unreachable {
        Failure::Unreachable(failed.hint(
            "is there a network? HF_ENDPOINT names another hub, HTTPS_PROXY a proxy; HF_HUB_OFFLINE=1 asks nobody",
        ))
    } else {
        Failure::Passing(failed, None)
    }
}

/// Text as a part of a URL's path.
pub(crate) fn encoded(part: &str) -> String {
    let mut text = String::with_capacity(part.len());
    for byte in part.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                text.push(char::from(byte));
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(endpoint: &str) -> Client {
        let options = HubOptions::new("/c").endpoint(endpoint).token("t".to_owned());
        Client::new(&options).unwrap()
    }

    #[test]
    fn the_token_is_for_the_endpoint_alone() {
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        for (endpoint, url, sent) in [
            ("https://hub.co", "https://hub.co/a", true),
            ("https://hub.co", "https://HUB.co:443/a", true),
            ("https://hub.co", "https://hub.co:444/a", false),
            ("https://hub.co", "https://cdn.hub.co/a", false),
            ("https://hub.co", "http://hub.co/a", false),
            ("http://hub.co", "http://hub.co/a", false),
            ("http://127.0.0.1:1", "http://127.0.0.1:1/a", true),
            ("http://127.0.0.1:1", "http://127.0.0.1:2/a", false),
        ] {
            assert_eq!(client(endpoint).may_have_token(&uri(url)), sent, "{endpoint} {url}");
        }
    }

    #[test]
    fn redirects_do_not_leave_tls() {
        let from: Uri = "https://hub.co/a/b?c".parse().unwrap();
        let to = |location: &'static str| {
            let headers = HeaderMap::from_iter([(
                ureq::http::header::LOCATION,
                ureq::http::HeaderValue::from_static(location),
            )]);
            redirect(&from, &headers).map(|uri| uri.to_string()).map_err(|e| e.to_string())
        };
        assert_eq!(to("/x?y=1").unwrap(), "https://hub.co/x?y=1");
        assert_eq!(to("https://cdn.co/x").unwrap(), "https://cdn.co/x");
        assert_eq!(to("//cdn.co/x").unwrap(), "https://cdn.co/x");
        assert_eq!(
            to("http://hub.co/x").unwrap_err(),
            "https://hub.co/a/b: a redirect to a host without TLS"
        );
        for nowhere in ["file:///etc/passwd", "x", ""] {
            assert!(
                to(nowhere).unwrap_err().ends_with("a redirect to what is no URL"),
                "{nowhere}"
            );
        }
    }

    #[test]
    fn endpoints_are_urls() {
        for endpoint in ["", "huggingface.co", "ftp://x", "https://"] {
            let error = Client::new(&HubOptions::new("/c").endpoint(endpoint)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{endpoint}");
        }
        assert_eq!(client("https://h/p/").url("api"), "https://h/p/api");
    }
}
