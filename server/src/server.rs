//! The listening socket, connections, the end.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use qhx::{CancelToken, Error, ErrorKind, Result};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::app::{App, Peer, Shared};
use crate::options::Options;
use crate::registry::Registry;
use crate::routes::router;
use crate::worker;

/// How often it is looked whether the server is to stop.
const LOOK: Duration = Duration::from_millis(50);

/// Threads that read and write; models have their own.
const IO_THREADS: usize = 2;

/// A server that listens. Connections are answered once it [runs](Server::run).
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
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
    pub fn bind(options: Options) -> Result<Self> {
        let registry = Registry::new(&options.bundles, &options.runtime, options.memory)?;
        let address = SocketAddr::new(options.host, options.port);
        let in_use = |e| {
            Error::caused(ErrorKind::Io, format_args!("{address} cannot be listened on"), e)
                .hint("is another server running there? --port takes another port, 0 a free one")
        };
        let listener = TcpListener::bind(address).map_err(in_use)?;
        listener.set_nonblocking(true).map_err(in_use)?;
        let address = listener.local_addr().map_err(in_use)?;
        let shared = Arc::new(App::new(options, registry));
        if let [only] = shared.registry.models.as_slice() {
            shared.registry.info(only, &shared.metrics)?;
        }
        Ok(Self { listener, address, shared })
    }

    /// The address that is listened on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests until `stop` is cancelled. Then no further one is taken, and those that are under way are
    /// finished, for [`Options::drain`] at most.
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
        let served = tokio.block_on(self.serve(stop)).map_err(failed);
        shared.queue.close();
        shared.queue.cancel.cancel();
        workers.into_iter().for_each(ended);
        tokio.shutdown_timeout(Duration::from_secs(1));
        served
    }

    async fn serve(self, stop: &CancelToken) -> std::io::Result<()> {
        let Self { listener, shared, .. } = self;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let router = router(&shared);
        let connections = Arc::new(Semaphore::new(shared.options.max_connections));
        let graceful = GracefulShutdown::new();
        while !stop.is_cancelled() {
            // One that is over the limit waits in the system's queue.
            let permit = Arc::clone(&connections).acquire_owned();
            let Ok(Ok(permit)) = timeout(LOOK, permit).await else { continue };
            match timeout(LOOK, listener.accept()).await {
                Err(_) => {}
                // Out of file descriptors, say.
                Ok(Err(_)) => sleep(LOOK).await,
                Ok(Ok((stream, peer))) => {
                    // Tokens go out as they come.
                    let _ = stream.set_nodelay(true);
                    let answering = connection(&shared, &router, stream, peer, &graceful);
                    tokio::spawn(async move {
                        answering.await;
                        drop(permit);
                    });
                }
            }
        }
        shared.stopping.store(true, Ordering::Release);
        drop(listener);
        if timeout(shared.options.drain, graceful.shutdown()).await.is_err() {
            tracing::warn!("requests were still under way when the time to finish them was up");
        }
        Ok(())
    }
}

/// Answers the requests of a connection.
fn connection(
    shared: &Shared,
    router: &Router,
    stream: tokio::net::TcpStream,
    peer: SocketAddr,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + use<> {
    let service = TowerToHyperService::new(router.clone().layer(Extension(Peer(peer))));
    let mut http = http1::Builder::new();
    // A client that closes its side has left: what it asked for is stopped.
    http.timer(TokioTimer::new()).header_read_timeout(shared.options.read_limit).half_close(false);
    let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
    async move {
        // A connection that breaks is its client's to repair.
        let _ = connection.await;
    }
}

fn ended(worker: JoinHandle<()>) {
    if worker.join().is_err() {
        tracing::error!("a thread of the server panicked");
    }
}
