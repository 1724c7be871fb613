//! One CA for the TLS cases, made by openssl when the bench starts: the certificates of load,
//! origin and peers, and the TLS settings of the bench's own load and origin. The gateway's
//! certificate is the controller's, signed by the same CA.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::Context;
use canal_bench_peers::any_certificate::AnyCertificate;
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// The trust domain of the benchmark's tenant.
pub(crate) const TRUST_DOMAIN: &str = "bench.example";

/// Names of the certificates' owners. HAProxy, nginx and Envoy present `peer` on both sides.
const NAMES: [&str; 3] = ["load", "origin", "peer"];

/// A folder with `ca.pem`, `ca.key`, and NAME.crt, NAME.key and NAME.pem (both) of each name.
pub(crate) struct BenchCertificates {
    pub(crate) dir: PathBuf,
}

impl BenchCertificates {
    pub(crate) fn make(dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let script = "set -e; cd \"$1\"; domain=$2; shift 2; new='openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
$new -x509 -days 2 -subj /CN=bench-ca -keyout ca.key -out ca.pem
for name; do
  printf '%s\\n' \"subjectAltName=URI:spiffe://$domain/ns/default/sa/$name,DNS:$name\" 'basicConstraints=critical,CA:FALSE' \
    'keyUsage=critical,digitalSignature' 'extendedKeyUsage=serverAuth,clientAuth' >$name.ext
  $new -subj /O=bench -keyout $name.key -out $name.csr
  openssl x509 -req -days 2 -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile $name.ext -out $name.crt
  cat $name.crt $name.key >$name.pem
done";
        let out = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(dir)
            .arg(TRUST_DOMAIN)
            .args(NAMES)
            .output()?;
        anyhow::ensure!(
            out.status.success(),
            "openssl created no certificates: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        Ok(Self {
            dir: dir.to_owned(),
        })
    }

    /// Returns the path of one of the files.
    pub(crate) fn file(&self, name: &str) -> String {
        self.dir.join(name).to_string_lossy().into_owned()
    }

    /// Writes the CA's files for a controller's `--ca-dir`.
    pub(crate) fn give_authority(&self, ca_dir: &Path) -> anyhow::Result<()> {
        let folder = ca_dir.join(TRUST_DOMAIN);
        std::fs::create_dir_all(&folder)?;
        for (from, to) in [
            ("ca.pem", "cert-chain.pem"),
            ("ca.pem", "root-cert.pem"),
            ("ca.key", "key.pem"),
        ] {
            std::fs::copy(self.dir.join(from), folder.join(to))?;
        }
        Ok(())
    }

    fn load_chain_and_key(
        &self,
        name: &str,
    ) -> anyhow::Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
        let chain = CertificateDer::pem_file_iter(self.file(&format!("{name}.crt")))?
            .collect::<Result<Vec<_>, _>>()?;
        Ok((
            chain,
            PrivateKeyDer::from_pem_file(self.file(&format!("{name}.key")))?,
        ))
    }

    /// Returns the load's TLS settings.
    pub(crate) fn client(&self) -> anyhow::Result<Arc<ClientConfig>> {
        let (chain, key) = self.load_chain_and_key("load")?;
        let provider = provider();
        let mut config = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
            .with_client_auth_cert(chain, key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.enable_sni = false;
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// Returns the origin's TLS settings: clients with a certificate of the CA are admitted.
    pub(crate) fn server(&self) -> anyhow::Result<Arc<ServerConfig>> {
        let (chain, key) = self.load_chain_and_key("origin")?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.file("ca.pem"))?)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .context("the verifier")?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }
}

/// Returns the algorithms that the mesh uses as well: only AES-GCM, so that all proxies use the
/// same cipher.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![cipher_suite::TLS13_AES_256_GCM_SHA384],
        ..aws_lc_rs::default_provider()
    })
}
