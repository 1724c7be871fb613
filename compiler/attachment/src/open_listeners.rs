//! Finds the listeners that are open, for what the compiler adds to them. It closes none.

use canal_model::ids::{Namespace, ObjectName};
use canal_model::ingress::Listener;
use canal_model::policy::ObjectKind;

use crate::listeners::TenantListeners;

impl TenantListeners {
    /// Returns an open listener of a Gateway or a ListenerSet by its name in that object.
    pub fn open_listener_mut(
        &mut self,
        kind: ObjectKind,
        (namespace, name): (&Namespace, &ObjectName),
        section: &ObjectName,
    ) -> Option<&mut Listener> {
        let object = (namespace.clone(), name.clone());
        let (gateway, set) = if kind == ObjectKind::ListenerSet {
            (self.listener_sets.get(&object)?.clone()?, Some(object))
        } else {
            (object, None)
        };
        let gateway = self.gateways.get_mut(&gateway)?.as_mut()?;
        let mut listeners = gateway.listeners.iter_mut();
        let placed = listeners.find(|it| {
            it.listener_set == set
                && it.section.as_ref() == Some(section)
                && it.listener.closed.is_none()
        })?;
        Some(&mut placed.listener)
    }
}
