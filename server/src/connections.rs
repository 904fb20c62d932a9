//! Connections: how many there may be, how many of one client, and when one that does not read is given up.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// Time after which it is tried again to accept a connection, where that failed.
pub(crate) const AGAIN: Duration = Duration::from_millis(50);

/// Part of all connections that one address may have.
const SHARE: usize = 4;

/// Silence after which the system asks whether the other side is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Time between two such questions.
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(15);

/// Bytes that the system keeps for a client that does not read. Linux takes twice as much; left to itself it takes
/// megabytes.
const SEND_BUFFER: usize = 128 << 10;

/// Client of an address, for limits: IPv4 addresses in the form of IPv6 count as IPv4, and the addresses of one IPv6
/// subnet as one, since a client has all of them.
pub(crate) fn client(address: SocketAddr) -> IpAddr {
    match address.ip().to_canonical() {
        IpAddr::V6(ip) if !ip.is_loopback() => {
            let [a, b, c, d, ..] = ip.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        ip => ip,
    }
}

/// Connections that are open.
#[derive(Debug)]
pub(crate) struct Connections {
    max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    all: usize,
    of: HashMap<IpAddr, usize>,
}

/// Reason why a connection has no place among the others. Only `/health` is answered on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Crowded {
    /// There are as many as there may be.
    Server,
    /// The client has as many as one may have.
    Client,
}

/// Place of a connection, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    connections: Arc<Connections>,
    client: IpAddr,
}

impl Connections {
    /// At most `max` at a time, and fewer where the process may not open as many files.
    pub(crate) fn new(max: usize) -> Arc<Self> {
        let max = max.min(max_files() / 4 * 3).max(1);
        Arc::new(Self { max, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a connection. Clients on this machine have no share of their own: a proxy among them speaks
    /// for many.
    pub(crate) fn enter(self: &Arc<Self>, client: IpAddr) -> Result<Place, Crowded> {
        let mut state = self.lock();
        if state.all >= self.max {
            return Err(Crowded::Server);
        }
        let share = if client.is_loopback() { self.max } else { self.max.div_ceil(SHARE) };
        let of = state.of.entry(client).or_default();
        if *of >= share {
            return Err(Crowded::Client);
        }
        *of += 1;
        state.all += 1;
        Ok(Place { connections: Arc::clone(self), client })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        state.all -= 1;
        if let Some(of) = state.of.get_mut(&self.client) {
            *of -= 1;
            if *of == 0 {
                state.of.remove(&self.client);
            }
        }
    }
}

/// Files that the process may have open.
fn max_files() -> usize {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, getrlimit};
        let files = getrlimit(Resource::Nofile).current;
        files.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX))
    }
    #[cfg(not(unix))]
    usize::MAX
}

/// Has the system notice a client that vanished, and tokens go out as they come. Where that fails, time limits are
/// left.
pub(crate) fn prepare(stream: &TcpStream, write_limit: Duration) {
    let _ = stream.set_nodelay(true);
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_AGAIN);
    let _ = socket.set_tcp_keepalive(&keepalive);
    let _ = socket.set_send_buffer_size(SEND_BUFFER);
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = socket.set_tcp_user_timeout(Some(write_limit.max(KEEPALIVE)));
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = write_limit;
}

/// A stream that fails once a write has made no progress for some time.
#[derive(Debug)]
pub(crate) struct Bounded {
    stream: TcpStream,
    write_limit: Duration,
    /// Runs while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Bounded {
    pub(crate) fn new(stream: TcpStream, write_limit: Duration) -> Self {
        Self { stream, write_limit, stalled: None }
    }

    /// Ends the wait with what a write came to.
    fn written<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.write_limit;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        match stalled.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Bounded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Bounded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.written(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        client(SocketAddr::new(text.parse().unwrap(), 1))
    }

    #[test]
    fn one_address_has_a_part_of_the_connections() {
        let connections = Connections::new(8);
        let taken = |address: &str| connections.enter(ip(address));
        let mut places: Vec<_> = (0..2).map(|_| taken("10.0.0.1").unwrap()).collect();
        assert_eq!(taken("::ffff:10.0.0.1").unwrap_err(), Crowded::Client);
        places.extend((0..2).map(|at| taken(&format!("2001:db8::{at}")).unwrap()));
        assert_eq!(taken("2001:db8::ffff").unwrap_err(), Crowded::Client);
        places.extend((0..4).map(|_| taken("127.0.0.1").unwrap()));
        assert_eq!(taken("10.0.0.2").unwrap_err(), Crowded::Server);
        places.remove(0);
        assert!(taken("10.0.0.1").is_ok());
    }
}
