//! Options of a server.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use qhx::{Bundle, Error, ErrorKind, Result, Runtime};
use qhx_base::setters;

use crate::access_log::Record;
use crate::catalog::Catalog;

/// Called with each request that is over.
pub(crate) type OnRequest = Arc<dyn Fn(&Record) + Send + Sync>;

/// Bundles to serve, clients to serve them to, and limits.
#[derive(Clone)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The bundles, each with the names that clients ask for; the first is that which the server tells.
    pub bundles: Vec<(Vec<String>, Bundle)>,
    /// Source of further models, which clients may add while the server runs.
    pub catalog: Option<Arc<dyn Catalog>>,
    /// Requests for a model that is not served are answered by the first one that can.
    pub any_model: bool,
    /// Runtime that opens the bundles.
    pub runtime: Runtime,
    /// The address that is listened on.
    pub host: IpAddr,
    /// The port; 0 takes a free one.
    pub port: u16,
    /// Address of the Wyoming protocol, which asks for no keys; port 0 takes a free one. `None` where it is not spoken.
    pub wyoming: Option<SocketAddr>,
    /// One of these is asked for, if there are any.
    pub api_keys: Vec<String>,
    /// True lets clients of different keys go on from each other's states. A client then learns from
    /// `usage.prompt_tokens_details.cached_tokens`, and from the time to the first token, what prompts of others begin
    /// with.
    pub share_states: bool,
    /// Origins of web pages whose requests are answered, besides the server's own: `https://example.org`, or `*`.
    pub allowed_origins: Vec<String>,
    /// Names that this server goes by, besides addresses, `localhost` and the machine's: without keys, requests by
    /// another name are refused.
    pub allowed_hosts: Vec<String>,
    /// Generations that take turns on the device.
    pub parallel: usize,
    /// Requests that may wait for their turn.
    pub queue: usize,
    /// Bytes that loaded models may take, by the size of their files and of the states that they keep.
    pub memory: Option<u64>,
    /// Time after which a model that nobody uses is unloaded, unless a request to Ollama's interface says otherwise for
    /// it; `None` keeps it.
    pub keep_alive: Option<Duration>,
    /// Bytes that a request may have.
    pub max_body: usize,
    /// Bytes that all requests together may take, by the size of their bodies and what is made of them.
    pub request_memory: usize,
    /// Time after which a session that nobody uses is closed; one of each model stays open.
    pub session_idle: Duration,
    /// Connections at a time.
    pub max_connections: usize,
    /// Longest time for a request, waiting included.
    pub time_limit: Duration,
    /// Longest time for a client to send its request.
    pub read_limit: Duration,
    /// Time after which a client that reads nothing of its response is given up.
    pub write_limit: Duration,
    /// Interval of comments in a stream in which nothing happens.
    pub heartbeat: Duration,
    /// Longest time for requests under way to end once the server is asked to stop.
    pub drain: Duration,
    /// Short texts of a request share graphs of an encoder. A vector then depends on what comes with its text, by some
    /// 1e-7.
    pub packs: bool,
    /// See [`ServerOptions::batching`].
    pub batching: bool,
    /// True if a [`Record`] has the text of the request.
    pub log_prompts: bool,
    pub(crate) on_request: Option<OnRequest>,
}

impl fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the keys.
        f.debug_struct("ServerOptions")
            .field("bundles", &self.bundles)
            .field("host", &self.host)
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            bundles: Vec::new(),
            catalog: None,
            any_model: false,
            runtime: Runtime::default(),
            host: Ipv4Addr::LOCALHOST.into(),
            port: 8080,
            wyoming: None,
            api_keys: Vec::new(),
            share_states: false,
            allowed_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            parallel: 4,
            queue: 64,
            memory: None,
            keep_alive: None,
            max_body: 32 << 20,
            request_memory: 256 << 20,
            session_idle: Duration::from_secs(300),
            max_connections: 1024,
            time_limit: Duration::from_secs(600),
            read_limit: Duration::from_secs(30),
            write_limit: Duration::from_secs(30),
            heartbeat: Duration::from_secs(10),
            drain: Duration::from_secs(30),
            packs: true,
            batching: true,
            log_prompts: false,
            on_request: None,
        }
    }
}

impl ServerOptions {
    setters! {
        /// Sets the runtime that opens the bundles.
        runtime: Runtime,
        /// Answers requests for any model by the first one that can: for clients that ask for one name only.
        any_model: bool,
        /// Lets clients of different keys go on from each other's states: for a server of one team.
        share_states: bool,
        /// Sets the number of requests that may wait for their turn.
        queue: usize,
        /// Bytes that a request may have.
        max_body: usize,
        /// Bytes that all requests together may take; a body is read once there is room for it.
        request_memory: usize,
        /// Time after which a session that nobody uses is closed; one of each model stays open.
        session_idle: Duration,
        /// Sets the longest time for a request, waiting included.
        time_limit: Duration,
        /// Sets the longest time for a client to send its request.
        read_limit: Duration,
        /// Time after which a client that reads nothing of its response is given up.
        write_limit: Duration,
        /// Sets the interval of comments in a stream in which nothing happens.
        heartbeat: Duration,
        /// Sets the longest time for requests under way to end once the server is asked to stop.
        drain: Duration,
        /// Has short texts of a request share graphs of an encoder, or has each go through a graph of its own.
        packs: bool,
        /// Has generations that are worked on at once take their steps together, or each its own.
        batching: bool,
        /// Sets whether a [`Record`] has the text of the request.
        log_prompts: bool,
        /// Sets the number of generations that take turns on the device; at least 1.
        parallel(parallel: usize) => parallel = parallel.max(1),
        /// Bytes that loaded models may take; the one that was asked for the longest time ago goes.
        memory(memory: impl Into<Option<u64>>) => memory = memory.into(),
        /// Time after which a model that nobody uses is unloaded.
        keep_alive(time: impl Into<Option<Duration>>) => keep_alive = time.into(),
        /// Address of the Wyoming protocol. Everybody who can connect is served, also where keys are asked for.
        wyoming(address: impl Into<Option<SocketAddr>>) => wyoming = address.into(),
        /// Source of further models, which clients may add and remove while the server runs. With one, there need be no
        /// bundle to serve.
        catalog(catalog: impl Catalog + 'static) => catalog = Some(Arc::new(catalog)),
        /// Called with each request that is over, on a thread of the server.
        on_request(f: impl Fn(&Record) + Send + Sync + 'static) => on_request = Some(Arc::new(f)),
    }

    /// Serves a bundle, too, under the name that its manifest has.
    #[must_use]
    pub fn bundle(self, bundle: Bundle) -> Self {
        let name = bundle.manifest().model.name.clone();
        self.bundle_as(name, bundle)
    }

    /// Serves a bundle, too, under this name.
    #[must_use]
    pub fn bundle_as(mut self, name: impl Into<String>, bundle: Bundle) -> Self {
        self.bundles.push((vec![name.into()], bundle));
        self
    }

    /// Serves the bundle that was given last under this name, too.
    #[must_use]
    pub fn alias(mut self, name: impl Into<String>) -> Self {
        if let Some((names, _)) = self.bundles.last_mut() {
            names.push(name.into());
        }
        self
    }

    /// The address and port that are listened on; port 0 takes a free one.
    #[must_use]
    pub fn listen(mut self, host: IpAddr, port: u16) -> Self {
        (self.host, self.port) = (host, port);
        self
    }

    /// Asks for one of these keys.
    #[must_use]
    pub fn api_keys(mut self, keys: impl IntoIterator<Item = String>) -> Self {
        self.api_keys.extend(keys);
        self
    }

    /// Asks for one of the keys of a file: one a line, lines with `#` are comments.
    ///
    /// # Errors
    /// When the file cannot be read, or has no key.
    pub fn api_key_file(self, file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).map_err(|e| Error::io(ErrorKind::Io, file, e))?;
        let lines = text.lines().map(str::trim);
        let keys: Vec<_> = lines
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(str::to_owned)
            .collect();
        if keys.is_empty() {
            let message = format!("{}: found no key, expected one a line", file.display());
            return Err(Error::new(ErrorKind::Usage, message));
        }
        Ok(self.api_keys(keys))
    }

    /// Answers requests of web pages of this origin, such as `https://example.org`; of any for `*`.
    #[must_use]
    pub fn allow_origin(mut self, origin: impl Into<String>) -> Self {
        self.allowed_origins.push(origin.into());
        self
    }

    /// Answers requests that name the server so, such as `models.example.org`; by any name for `*`. Without keys, other
    /// names than addresses, `localhost` and the machine's own are refused, since a page can give its own to any
    /// address.
    #[must_use]
    pub fn allow_host(mut self, host: impl Into<String>) -> Self {
        self.allowed_hosts.push(host.into());
        self
    }
}
