//! The controller's services as any holder of a token can call them, from any host: certificates,
//! subscriptions, the operators' API. It does not check the results.

use std::collections::BTreeMap;
use std::time::Duration;

use canal_timing::deadline;
use canal_wire::api::admin_client::AdminClient;
use canal_wire::api::{
    ApplyRequest, ApplyResponse, DeleteRequest, DiffResponse, File, FleetRequest, GetRequest,
    ObjectRef, ReplicaRequest, RevokeRequest, RotateRequest, StatusRequest, TrustRequest,
};
use canal_wire::citadel::IstioCertificateRequest;
use canal_wire::citadel::istio_certificate_service_client::IstioCertificateServiceClient;
use canal_wire::discovery::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use canal_wire::discovery::{DeltaDiscoveryRequest, Node};
use canal_wire::{CONTROLLER_NAME, CONTROLLER_PORT, MESSAGE_BYTES_MAX};
use canal_world::World;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};

/// Timeout of a connection. It only has to exceed what a quiet machine needs: in the gate,
/// `deadline` waits a minute or more.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a call. A change that fills a tenant's shares is compiled for several seconds. It
/// only has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);
/// Time without a message after which a subscription counts as complete. The controller sends what
/// it has without a pause. Nobody measured the value.
const QUIET: Duration = Duration::from_millis(1500);

/// The host and the token of a call.
#[derive(Clone)]
pub struct Caller<'c> {
    world: &'c World,
    host: &'c str,
    token: String,
}

impl<'c> Caller<'c> {
    /// Uses the token of the host itself.
    pub fn as_itself(world: &'c World, host: &'c str) -> Self {
        Self::with_token_of(world, host, host)
    }

    /// Returns a caller that uses another host's token.
    pub fn with_token_of(world: &'c World, host: &'c str, owner: &str) -> Self {
        let path = world.dir().join("tokens").join(format!("{owner}.token"));
        let token =
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self { world, host, token }
    }

    /// Uses a token with this text.
    pub fn with_token(world: &'c World, host: &'c str, token: &str) -> Self {
        Self {
            world,
            host,
            token: token.to_owned(),
        }
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let token = format!("Bearer {}", self.token.trim())
            .parse()
            .unwrap_or_else(|e| panic!("the token: {e}"));
        request.metadata_mut().insert("authorization", token);
        request
    }

    /// Connects and calls, inside the host's network namespace.
    fn call<T: Send, F: Future<Output = Result<T, Status>>>(
        &self,
        work: impl FnOnce(Channel) -> F + Send,
    ) -> Result<T, Status> {
        let address = self
            .world
            .host("controller")
            .ok()
            .and_then(|host| host.ip4())
            .expect("a controller");
        let root = std::fs::read(self.world.root_ca()).expect("the controller's root");
        let attempt = || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let tls = ClientTlsConfig::new()
                    .ca_certificate(Certificate::from_pem(root))
                    .domain_name(CONTROLLER_NAME);
                let endpoint =
                    Endpoint::from_shared(format!("https://{address}:{CONTROLLER_PORT}"))
                        .and_then(|e| e.tls_config(tls));
                let endpoint = endpoint
                    .expect("an endpoint")
                    .connect_timeout(deadline(TIMEOUT));
                let channel = endpoint
                    .connect()
                    .await
                    .map_err(|e| Status::unavailable(format!("{e:?}")))?;
                let late = |_| Status::deadline_exceeded("no answer in time");
                tokio::time::timeout(deadline(ANSWERED_WITHIN), work(channel))
                    .await
                    .map_err(late)?
            })
        };
        self.world
            .inside(self.host, attempt)
            .unwrap_or_else(|e| panic!("{}: {e}", self.host))
    }

    /// Requests a certificate. `service` is the `Service` of the metadata. The result is the chain
    /// in PEM.
    pub fn certificate(
        &self,
        identity: &str,
        csr: &str,
        service: Option<&str>,
    ) -> Result<Vec<String>, Status> {
        use prost_types::value::Kind;
        let text = |value: &str| prost_types::Value {
            kind: Some(Kind::StringValue(value.to_owned())),
        };
        let mut fields = BTreeMap::from([("ImpersonatedIdentity".to_owned(), text(identity))]);
        fields.extend(service.map(|service| ("Service".to_owned(), text(service))));
        let message = IstioCertificateRequest {
            csr: csr.to_owned(),
            validity_duration: 3600,
            metadata: Some(prost_types::Struct { fields }),
        };
        let request = self.request(message);
        self.call(|channel| async move {
            let answer = IstioCertificateServiceClient::new(channel)
                .create_certificate(request)
                .await?;
            Ok(answer.into_inner().cert_chain)
        })
    }

    /// Subscribes to names of a type (none: the wildcard), and returns the names of the resources
    /// that arrive until no more come.
    pub fn subscribe(
        &self,
        node: &str,
        type_url: &str,
        names: &[&str],
    ) -> Result<Vec<String>, Status> {
        let first = DeltaDiscoveryRequest {
            node: Some(Node {
                id: node.to_owned(),
                ..Node::default()
            }),
            type_url: type_url.to_owned(),
            resource_names_subscribe: names.iter().map(|name| (*name).to_owned()).collect(),
            ..DeltaDiscoveryRequest::default()
        };
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        sender.send(first).expect("the receiver lives");
        let request = self.request(tokio_stream::wrappers::UnboundedReceiverStream::new(
            receiver,
        ));
        self.call(|channel| async move {
            let mut client = AggregatedDiscoveryServiceClient::new(channel)
                .max_decoding_message_size(MESSAGE_BYTES_MAX);
            let mut stream = client
                .delta_aggregated_resources(request)
                .await?
                .into_inner();
            let mut names = Vec::new();
            while let Ok(Some(response)) = tokio::time::timeout(QUIET, stream.message())
                .await
                .unwrap_or(Ok(None))
            {
                names.extend(response.resources.into_iter().map(|resource| resource.name));
            }
            // The stream must stay open until here.
            drop(sender);
            Ok(names)
        })
    }

    /// Applies objects for a tenant. An error means that the caller is refused; problems with the
    /// objects are in the response.
    pub fn apply(&self, tenant: &str, yaml: &str) -> Result<ApplyResponse, Status> {
        let files = vec![File {
            path: "objects.yaml".into(),
            yaml: yaml.into(),
        }];
        let request = self.request(ApplyRequest {
            tenant: tenant.into(),
            files,
            dry_run: false,
        });
        self.call(|channel| async move {
            let mut client = AdminClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
            Ok(client.apply(request).await?.into_inner())
        })
    }

    /// Requests the changes that applying the objects would make; nothing is changed.
    pub fn diff(&self, tenant: &str, yaml: &str) -> Result<DiffResponse, Status> {
        let files = vec![File {
            path: "objects.yaml".into(),
            yaml: yaml.into(),
        }];
        let request = self.request(ApplyRequest {
            tenant: tenant.into(),
            files,
            dry_run: true,
        });
        self.call(|channel| async move {
            Ok(AdminClient::new(channel).diff(request).await?.into_inner())
        })
    }

    /// Returns all objects of a tenant as YAML.
    pub fn get(&self, tenant: &str) -> Result<Vec<String>, Status> {
        let request = self.request(GetRequest {
            tenant: tenant.into(),
            ..GetRequest::default()
        });
        let objects = self.call(|channel| async move {
            Ok(AdminClient::new(channel)
                .get(request)
                .await?
                .into_inner()
                .objects)
        })?;
        Ok(objects.into_iter().map(|object| object.yaml).collect())
    }

    /// Deletes one object through the operators' API.
    pub fn delete(&self, tenant: &str, kind: &str, name: &str) -> Result<(), Status> {
        self.delete_each(tenant, &[(kind, name.to_owned())])
    }

    /// Removes objects, given by kind and name, in one request.
    pub fn delete_each(&self, tenant: &str, objects: &[(&str, String)]) -> Result<(), Status> {
        let object = |(kind, name): &(&str, String)| ObjectRef {
            kind: (*kind).into(),
            namespace: "default".into(),
            name: name.clone(),
        };
        let objects = objects.iter().map(object).collect();
        let request = self.request(DeleteRequest {
            tenant: tenant.into(),
            objects,
            ignore_missing: true,
            all: false,
        });
        self.call(
            |channel| async move { AdminClient::new(channel).delete(request).await.map(drop) },
        )
    }

    /// Removes all that was applied for a tenant; only the provider may do this.
    pub fn delete_all(&self, tenant: &str) -> Result<(), Status> {
        let request = self.request(DeleteRequest {
            tenant: tenant.into(),
            all: true,
            ..DeleteRequest::default()
        });
        self.call(
            |channel| async move { AdminClient::new(channel).delete(request).await.map(drop) },
        )
    }

    /// Returns everything that the controller shows of a tenant as text: its status, its fleet and
    /// its CAs.
    pub fn overview(&self) -> Result<String, Status> {
        let (status, fleet) = (
            self.request(StatusRequest {}),
            self.request(FleetRequest {}),
        );
        let trust = self.request(TrustRequest::default());
        self.call(|channel| async move {
            let mut client = AdminClient::new(channel);
            let status = client.status(status).await?.into_inner();
            let fleet = client.fleet(fleet).await?.into_inner();
            let trust = client.trust(trust).await?.into_inner();
            Ok(format!("{status:?} {fleet:?} {trust:?}"))
        })
    }

    /// Takes a replica out of service.
    pub fn drain(&self, replica: &str) -> Result<(), Status> {
        let request = self.request(ReplicaRequest {
            name: replica.into(),
        });
        self.call(|channel| async move {
            AdminClient::new(channel)
                .drain_replica(request)
                .await
                .map(drop)
        })
    }

    /// Puts a drained replica back into service.
    pub fn undrain(&self, replica: &str) -> Result<(), Status> {
        let request = self.request(ReplicaRequest {
            name: replica.into(),
        });
        self.call(|channel| async move {
            AdminClient::new(channel)
                .undrain_replica(request)
                .await
                .map(drop)
        })
    }

    /// Starts the rotation of a tenant's root.
    pub fn rotate(&self, tenant: &str) -> Result<(), Status> {
        let request = self.request(RotateRequest {
            tenant: tenant.into(),
            force: false,
        });
        self.call(|channel| async move {
            AdminClient::new(channel)
                .rotate_root(request)
                .await
                .map(drop)
        })
    }

    /// Revokes an identity through the operators' API.
    pub fn revoke(&self, tenant: &str, identity: &str) -> Result<(), Status> {
        let message = RevokeRequest {
            tenant: tenant.into(),
            identity: identity.into(),
            ..RevokeRequest::default()
        };
        let request = self.request(message);
        self.call(
            |channel| async move { AdminClient::new(channel).revoke(request).await.map(drop) },
        )
    }

    /// Restores a revoked identity through the operators' API.
    pub fn restore(&self, tenant: &str, identity: &str) -> Result<(), Status> {
        let message = RevokeRequest {
            tenant: tenant.into(),
            identity: identity.into(),
            ..RevokeRequest::default()
        };
        let request = self.request(message);
        self.call(
            |channel| async move { AdminClient::new(channel).restore(request).await.map(drop) },
        )
    }
}
