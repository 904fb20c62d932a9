//! TLS before a hub: what arrives encrypted goes on to the hub as it is.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, Stream};

/// The certificate of `localhost`, which no authority has signed, as PEM. Its key lies beside it: it proves
/// nothing to anybody but these tests.
pub const CERTIFICATE: &str = include_str!("loopback.crt");
const KEY: &str = include_str!("loopback.key");
/// Longest head of a request.
const MAX_HEAD: usize = 1 << 16;

/// Listens at a free port of loopback; returns the endpoint. The thread ends with the process.
pub(crate) fn before(hub: SocketAddr) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let config = Arc::new(config().expect("a certificate"));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let config = Arc::clone(&config);
            // Who does not trust the certificate goes away.
            std::thread::spawn(move || forward(stream, config, hub));
        }
    });
    format!("https://localhost:{port}")
}

fn config() -> Result<ServerConfig, Box<dyn std::error::Error>> {
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes())?;
    let key = PrivateKeyDer::from_pem_slice(KEY.as_bytes())?;
    let builder =
        ServerConfig::builder_with_provider(Arc::new(rustls_graviola::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?.with_no_client_auth();
    Ok(builder.with_single_cert(vec![certificate], key)?)
}

/// Forwards one request, and what the hub answers until it closes.
fn forward(mut stream: TcpStream, config: Arc<ServerConfig>, hub: SocketAddr) -> io::Result<()> {
    let mut connection = ServerConnection::new(config).map_err(io::Error::other)?;
    let mut client = Stream::new(&mut connection, &mut stream);
    let mut head = Vec::new();
    let mut piece = [0; 4096];
    while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD {
        match client.read(&mut piece)? {
            0 => return Ok(()),
            read => head.extend_from_slice(&piece[..read]),
        }
    }
    let mut server = TcpStream::connect(hub)?;
    server.write_all(&head)?;
    io::copy(&mut server, &mut client)?;
    client.conn.send_close_notify();
    client.flush()
}
