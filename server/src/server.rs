//! The listening socket, connections, the end.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use qhx::{CancelToken, Error, ErrorKind, Result};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::app::{App, Peer, Shared, tidy};
use crate::connections::{AGAIN, Bounded, Connections, Crowded, client, prepare};
use crate::options::ServerOptions;
use crate::registry::Registry;
use crate::routes::router;
use crate::{manage, worker, wyoming};

/// Connections beyond the limits that are answered at a time.
const LOBBY: usize = 64;

/// Time that such a connection has at least.
const LOBBY_TIME: Duration = Duration::from_millis(100);

/// Threads that read and write; models have their own.
const IO_THREADS: usize = 2;

/// A server that listens. Connections are answered once it [runs](Server::run).
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    /// The listener of the Wyoming protocol, and its address.
    wyoming: Option<(TcpListener, SocketAddr)>,
    shared: Shared,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Server {
    /// Looks at the bundles and listens. Where there is one bundle only, it is loaded, so that one that does not work
    /// is an error here; of several, each is loaded when it is asked for.
    ///
    /// # Errors
    /// When a bundle's host-op is not found, two bundles have one name, the only one does not load, or the address
    /// cannot be listened on.
    pub fn bind(options: ServerOptions) -> Result<Self> {
        let registry = Registry::new(&options)?;
        let address = SocketAddr::new(options.host, options.port);
        let (listener, address) = listen(address, "--port")?;
        let wyoming = options.wyoming.map(|address| listen(address, "--wyoming")).transpose()?;
        let shared = Arc::new(App::new(options, registry));
        if let [only] = &*shared.registry.models() {
            shared.registry.info(only, &shared.metrics)?;
        }
        manage::begin_with_obtained(&shared);
        Ok(Self { listener, address, wyoming, shared })
    }

    /// The address that is listened on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address of the Wyoming protocol, where it is spoken.
    pub fn wyoming_address(&self) -> Option<SocketAddr> {
        self.wyoming.as_ref().map(|(_, address)| *address)
    }

    /// Answers requests until `stop` is cancelled. Then no further one is taken, and those that are under way are
    /// finished, for [`ServerOptions::drain`] at most.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn run(self, stop: &CancelToken) -> Result<()> {
        let failed = |e| Error::caused(ErrorKind::Internal, "the server cannot start", e);
        let mut tokio = tokio::runtime::Builder::new_multi_thread();
        tokio.worker_threads(IO_THREADS).thread_name("qhx-server").enable_all();
        let tokio = tokio.build().map_err(failed)?;
        let workers = worker::start(&self.shared)?;
        let shared = Arc::clone(&self.shared);
        let stopped = Arc::<Notify>::default();
        let watch = Watch::new(stop, &stopped).map_err(failed)?;
        let served = tokio.block_on(self.serve(&stopped)).map_err(failed);
        watch.end();
        shared.queue.close();
        shared.queue.cancel.cancel();
        workers.into_iter().for_each(ended);
        tokio.shutdown_timeout(Duration::from_secs(1));
        served
    }

    async fn serve(self, stopped: &Notify) -> std::io::Result<()> {
        let Self { listener, shared, wyoming, .. } = self;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        if let Some((listener, _)) = wyoming {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            tokio::spawn(wyoming::serve(Arc::clone(&shared), listener));
        }
        let router = router(&shared);
        let connections = Connections::new(shared.options.max_connections);
        let mut lobby = Lobby::default();
        let tidying = tokio::spawn(tidy(Arc::clone(&shared)));
        let mut stopped = pin!(stopped.notified());
        loop {
            let next = poll_fn(|cx| match stopped.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(None),
                Poll::Pending => listener.poll_accept(cx).map(Some),
            });
            let Some(accepted) = next.await else { break };
            let Ok((stream, peer)) = accepted else {
                // Out of file descriptors, say.
                sleep(AGAIN).await;
                continue;
            };
            let place = connections.enter(client(peer));
            let crowded = place.as_ref().err().copied();
            if crowded.is_some() {
                lobby.make_room().await;
            }
            let answering = connection(&shared, &router, stream, (peer, crowded));
            let task = tokio::spawn(async move {
                answering.await;
                drop(place);
            });
            if crowded.is_some() {
                lobby.0.push_back((Instant::now(), task));
            }
        }
        shared.stopping.send_replace(true);
        shared.pulls.cancel();
        tidying.abort();
        drop(listener);
        if timeout(shared.options.drain, shared.stopping.closed()).await.is_err() {
            tracing::warn!("requests were still under way when the time to finish them was up");
        }
        Ok(())
    }
}

/// Listens on an address, which an option gives the port of.
fn listen(address: SocketAddr, option: &str) -> Result<(TcpListener, SocketAddr)> {
    let in_use = |e| {
        Error::caused(ErrorKind::Io, format_args!("{address} cannot be listened on"), e).hint(
            format!("is another server running there? {option} takes another port, 0 a free one"),
        )
    };
    let listener = TcpListener::bind(address).map_err(in_use)?;
    listener.set_nonblocking(true).map_err(in_use)?;
    let address = listener.local_addr().map_err(in_use)?;
    Ok((listener, address))
}

/// Connections beyond the limits, on which `/health` is answered and everything else is refused. There is always room
/// for another one: the oldest goes.
#[derive(Default)]
struct Lobby(VecDeque<(Instant, tokio::task::JoinHandle<()>)>);

impl Lobby {
    async fn make_room(&mut self) {
        self.0.retain(|(_, task)| !task.is_finished());
        if self.0.len() < LOBBY {
            return;
        }
        if let Some((since, task)) = self.0.pop_front() {
            sleep_until(since + LOBBY_TIME).await;
            task.abort();
        }
    }
}

/// Answers the requests of a connection.
fn connection(
    shared: &Shared,
    router: &Router,
    stream: tokio::net::TcpStream,
    (peer, crowded): (SocketAddr, Option<Crowded>),
) -> impl Future<Output = ()> + use<> {
    let ServerOptions { read_limit, write_limit, .. } = shared.options;
    prepare(&stream, write_limit);
    let router = router.clone().layer(Extension(Peer { address: peer, crowded }));
    let mut http = http1::Builder::new();
    // A client that closes its side has left: what it asked for is stopped.
    http.timer(TokioTimer::new()).header_read_timeout(read_limit).half_close(false);
    http.keep_alive(crowded.is_none());
    let io = TokioIo::new(Bounded::new(stream, write_limit));
    let service = TowerToHyperService::new(router);
    let connection = http.serve_connection(io, service).with_upgrades();
    let mut stopping = shared.stopping.subscribe();
    async move {
        let mut connection = pin!(connection);
        let mut stop = pin!(stopping.wait_for(|stopping| *stopping));
        let mut asked = false;
        let served = poll_fn(|cx| {
            if !asked && stop.as_mut().poll(cx).is_ready() {
                asked = true;
                connection.as_mut().graceful_shutdown();
            }
            connection.as_mut().poll(cx)
        });
        // A connection that breaks is its client's to repair.
        let _ = served.await;
    }
}

/// A thread that waits until a server is asked to stop.
struct Watch {
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Watch {
    fn new(stop: &CancelToken, stopped: &Arc<Notify>) -> std::io::Result<Self> {
        let over = Arc::<AtomicBool>::default();
        let (stop, stopped, ended) = (stop.clone(), Arc::clone(stopped), Arc::clone(&over));
        let thread = std::thread::Builder::new().name("qhx-stop".to_owned()).spawn(move || {
            stop.unpark(&std::thread::current());
            while !stop.is_cancelled() && !ended.load(Ordering::Acquire) {
                std::thread::park();
            }
            stopped.notify_one();
        })?;
        Ok(Self { over, thread })
    }

    fn end(self) {
        self.over.store(true, Ordering::Release);
        self.thread.thread().unpark();
        ended(self.thread);
    }
}

fn ended(worker: JoinHandle<()>) {
    if worker.join().is_err() {
        tracing::error!("a thread of the server panicked");
    }
}
