package conformance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	gatewayv1alpha2 "sigs.k8s.io/gateway-api/apis/v1alpha2"
	gatewayv1alpha3 "sigs.k8s.io/gateway-api/apis/v1alpha3"
	gatewayv1beta1 "sigs.k8s.io/gateway-api/apis/v1beta1"
	gatewayxv1alpha1 "sigs.k8s.io/gateway-api/apisx/v1alpha1"
	"sigs.k8s.io/yaml"
)

// cluster is what the suite sees as a Kubernetes API: objects in memory, of which each change is
// made in the tenant of the world first. An object that Canal refuses is not created, and the suite
// gets Canal's reason. Nothing writes a status except of pods, so that a test which waits for a
// condition fails.
type cluster struct {
	client.Client
	world    *world
	topology *topology

	mu sync.Mutex
	// fixed are the keys of the objects that the world's files have; `canal apply` cannot change them.
	fixed map[string]bool
	// services counts the Services that have an address.
	services int
	// refusal is Canal's reason for the first change that it refused since it was last taken.
	refusal string
}

func newCluster(world *world, topology *topology) (*cluster, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme, gatewayv1.Install, gatewayv1alpha2.Install,
		gatewayv1alpha3.Install, gatewayv1beta1.Install, gatewayxv1alpha1.Install,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	c := &cluster{world: world, topology: topology, fixed: map[string]bool{}, services: len(topology.services)}
	for _, service := range topology.services {
		c.fixed[keyOf(service)] = true
	}
	pods, err := podsOf(world, topology)
	if err != nil {
		return nil, err
	}
	c.Client = fake.NewClientBuilder().WithScheme(scheme).WithObjects(pods...).WithInterceptorFuncs(interceptor.Funcs{
		Create: func(ctx context.Context, under client.WithWatch, object client.Object, opts ...client.CreateOption) error {
			if err := c.apply(object); err != nil {
				return err
			}
			return under.Create(ctx, object, opts...)
		},
		Update: func(ctx context.Context, under client.WithWatch, object client.Object, opts ...client.UpdateOption) error {
			if err := c.apply(object); err != nil {
				return err
			}
			return under.Update(ctx, object, opts...)
		},
		Patch: func(ctx context.Context, under client.WithWatch, object client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if err := under.Patch(ctx, object, patch, opts...); err != nil {
				return err
			}
			return c.apply(object)
		},
		Delete: func(ctx context.Context, under client.WithWatch, object client.Object, opts ...client.DeleteOption) error {
			if err := c.delete(object); err != nil {
				return err
			}
			return under.Delete(ctx, object, opts...)
		},
	}).Build()
	return c, nil
}

// takeRefusal returns the first refusal since the last call, or "".
func (c *cluster) takeRefusal() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	refusal := c.refusal
	c.refusal = ""
	return refusal
}

// apply makes the object in the tenant. Kinds that do not concern a mesh, such as Namespace, are
// sent too: Canal itself says that it leaves them to Kubernetes. Secrets and ConfigMaps become files
// of the volumes that pods have of them.
func (c *cluster) apply(object client.Object) error {
	if err := c.change(object, "apply", "--wait", "60"); err != nil {
		return err
	}
	switch object := object.(type) {
	case *corev1.Secret:
		return c.writeVolume("Secret", object, object.Data)
	case *corev1.ConfigMap:
		data := map[string][]byte{}
		for key, text := range object.Data {
			data[key] = []byte(text)
		}
		return c.writeVolume("ConfigMap", object, data)
	}
	return nil
}

func (c *cluster) writeVolume(kind string, object client.Object, data map[string][]byte) error {
	folder := volumeFolder(c.topology.folder, kind, object.GetNamespace(), object.GetName())
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	for key, content := range data {
		if err := os.WriteFile(filepath.Join(folder, key), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) delete(object client.Object) error {
	return c.change(object, "delete", "--ignore-missing")
}

func (c *cluster) change(object client.Object, command ...string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	written, err := c.written(object)
	if err != nil || c.fixed[keyOf(written)] {
		return err
	}
	text, err := yaml.Marshal(written.Object)
	if err != nil {
		return err
	}
	if err = c.world.change(text, command...); err != nil && c.refusal == "" {
		c.refusal = err.Error()
	}
	return err
}

// written returns the object as a file would have it, a Service with addresses.
func (c *cluster) written(object client.Object) (*unstructured.Unstructured, error) {
	kinds, _, err := c.Scheme().ObjectKinds(object)
	if err != nil {
		return nil, err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return nil, err
	}
	written := &unstructured.Unstructured{Object: content}
	written.SetGroupVersionKind(kinds[0])
	written.SetResourceVersion("")
	written.SetManagedFields(nil)
	unstructured.RemoveNestedField(written.Object, "status")
	address, _, _ := unstructured.NestedString(written.Object, "spec", "clusterIP")
	if written.GetKind() == "Service" && address == "" {
		c.services++
		err = setAddresses(written, c.services)
	}
	return written, err
}

// podHost is the name of a pod among a world's hosts.
func podHost(namespace, pod string) string {
	return strings.Join([]string{tenantName, namespace, pod}, "/")
}

func keyOf(object client.Object) string {
	kind := object.GetObjectKind().GroupVersionKind().Kind
	return strings.Join([]string{kind, object.GetNamespace(), object.GetName()}, "/")
}

// podsOf returns the world's pods as the suite reads them: each is ready as the world says.
func podsOf(world *world, topology *topology) ([]client.Object, error) {
	hosts, err := world.hosts()
	if err != nil {
		return nil, err
	}
	byName := map[string]worldHost{}
	for _, host := range hosts {
		byName[host.Name] = host
	}
	var pods []client.Object
	for _, p := range topology.pods {
		host, ok := byName[podHost(p.Namespace, p.hostName())]
		if !ok {
			return nil, fmt.Errorf("the world has no pod %s/%s", p.Namespace, p.hostName())
		}
		ready := corev1.ConditionFalse
		if host.Ready {
			ready = corev1.ConditionTrue
		}
		pods = append(pods, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: p.hostName(), Namespace: p.Namespace, Labels: p.Labels},
			Status: corev1.PodStatus{
				PodIP:      host.IPv4,
				Phase:      corev1.PodRunning,
				Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}},
			},
		})
	}
	return pods, nil
}
