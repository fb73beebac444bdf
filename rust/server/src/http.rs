//! Connections: accepted, with TLS or without, bounded in the time that they may be silent, and closed in good order.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// Time for the head of a request, the wait for it on a kept connection included, and for a TLS handshake.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Wait after an accept that failed: there are no descriptors left, say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Reads a certificate chain and its key, both PEM.
///
/// # Errors
/// A file cannot be read, or has no certificate or key, or they do not belong together.
pub(crate) fn tls(certificate: &Path, key: &Path) -> io::Result<TlsAcceptor> {
    let open = |path: &Path| File::open(path).map(BufReader::new);
    let chain = CertificateDer::pem_reader_iter(open(certificate)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| invalid(certificate, &error))?;
    let key_der =
        PrivateKeyDer::from_pem_reader(open(key)?).map_err(|error| invalid(key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_no_client_auth()
                .with_single_cert(chain, key_der)
        })
        .map_err(|error| invalid(certificate, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn invalid(path: &Path, error: &dyn std::fmt::Display) -> io::Error {
    let message = format!("{}: {error}", path.display());
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// Answers connections until `stop`; then idle ones are closed, and replies that are on their way are finished.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    mut stop: oneshot::Receiver<()>,
) {
    let graceful = GracefulShutdown::new();
    loop {
        let stream = tokio::select! {
            // A sender that is gone means the same.
            _ = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(_) => {
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        // Each event leaves by itself, however small it is.
        let _ = stream.set_nodelay(true);
        let (watcher, router, tls) = (graceful.watcher(), router.clone(), tls.clone());
        tokio::spawn(async move {
            match tls {
                None => converse(stream, router, watcher).await,
                Some(acceptor) => {
                    if let Some(stream) = handshake(&acceptor, stream).await {
                        converse(stream, router, watcher).await;
                    }
                }
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn handshake(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
) -> Option<tokio_rustls::server::TlsStream<TcpStream>> {
    timeout(HEAD_TIMEOUT, acceptor.accept(stream))
        .await
        .ok()?
        .ok()
}

async fn converse<S>(stream: S, router: Router, watcher: hyper_util::server::graceful::Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // What a client does to its own connection is no news.
    let _ = watcher.watch(connection).await;
}
