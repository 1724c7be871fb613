//! The requests of `canal ca` as an operator's client sends them. The tests decide what the answers
//! must be.

use std::time::{Duration, Instant};

use canal_wire::api;

use crate::fixture::{ControllerFixture, Operator, wait_limit, with_token};

/// An operator's client for the requests of `canal ca`, and the tenant that they are about.
pub(super) struct CaCli(pub(super) Operator, pub(super) &'static str);

impl CaCli {
    pub(super) async fn of(fixture: &ControllerFixture) -> Self {
        Self(fixture.admin("root").await, "alpha")
    }
    pub(super) async fn status(&mut self) -> api::TrustDomainStatus {
        let request = api::TrustRequest {
            tenant: self.1.into(),
            certificates: true,
        };
        let answer = self
            .0
            .client
            .trust(with_token(request, self.0.token))
            .await
            .unwrap()
            .into_inner();
        answer.domains.into_iter().next().unwrap()
    }
    pub(super) async fn rotate(
        &mut self,
        force: bool,
    ) -> Result<api::TrustResponse, tonic::Status> {
        let request = api::RotateRequest {
            tenant: self.1.into(),
            force,
        };
        self.0
            .client
            .rotate_root(with_token(request, self.0.token))
            .await
            .map(tonic::Response::into_inner)
    }
    pub(super) async fn revoke(
        &mut self,
        identity: &str,
        serial: &str,
    ) -> Result<api::TrustResponse, tonic::Status> {
        let request = api::RevokeRequest {
            tenant: self.1.into(),
            identity: identity.into(),
            serial: serial.into(),
        };
        self.0
            .client
            .revoke(with_token(request, self.0.token))
            .await
            .map(tonic::Response::into_inner)
    }
    pub(super) async fn restore(
        &mut self,
        identity: &str,
    ) -> Result<api::TrustResponse, tonic::Status> {
        let request = api::RevokeRequest {
            tenant: self.1.into(),
            identity: identity.into(),
            serial: String::new(),
        };
        self.0
            .client
            .restore(with_token(request, self.0.token))
            .await
            .map(tonic::Response::into_inner)
    }
    pub(super) async fn phase(&mut self, want: &str) -> api::TrustDomainStatus {
        let until = Instant::now() + wait_limit();
        loop {
            let status = self.status().await;
            if status.phase == want {
                return status;
            }
            assert!(
                Instant::now() < until,
                "the rotation stays {}: {:?}",
                status.phase,
                status.waiting
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
