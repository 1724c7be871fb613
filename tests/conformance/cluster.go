package conformance

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
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
// made in the tenant of the world first. What an API server does itself is done here: defaults of fields, generations
// and times of creation. The status of an object is what Canal says of it when the suite reads it.
type cluster struct {
	client.Client
	world    *world
	topology *topology
	status   *statusReader
	defaults defaults

	mu sync.Mutex
	// fixed are the keys of the objects that the world's files have; `canal apply` cannot change them.
	fixed map[string]bool
	// unknown are the kinds of which Canal keeps no object, such as Deployment.
	unknown map[string]bool
	// services counts the Services that have an address.
	services int
	// refusal is Canal's reason for the first change that it refused since it was last taken.
	refusal string
}

func newCluster(world *world, topology *topology, crds string) (*cluster, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme, gatewayv1.Install, gatewayv1alpha2.Install,
		gatewayv1alpha3.Install, gatewayv1beta1.Install, gatewayxv1alpha1.Install,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	c := &cluster{world: world, topology: topology, status: &statusReader{world: world}, fixed: map[string]bool{}, unknown: map[string]bool{}, services: len(topology.services)}
	for _, service := range topology.services {
		c.fixed[keyOf(service)] = true
	}
	var err error
	if c.defaults, err = readDefaults(crds); err != nil {
		return nil, err
	}
	pods, err := podsOf(world, topology)
	if err != nil {
		return nil, err
	}
	c.Client = fake.NewClientBuilder().WithScheme(scheme).WithObjects(pods...).
		WithStatusSubresource(withStatus()...).
		WithInterceptorFuncs(interceptor.Funcs{
			Get: c.get, List: c.list, Create: c.create, Update: c.update, Patch: c.patch,
			Delete: func(ctx context.Context, under client.WithWatch, object client.Object, opts ...client.DeleteOption) error {
				if err := c.delete(object); err != nil {
					return err
				}
				return under.Delete(ctx, object, opts...)
			},
		}).Build()
	return c, nil
}

// withStatus returns an object of each kind of which a controller writes the status.
func withStatus() []client.Object {
	return []client.Object{
		&gatewayv1.GatewayClass{}, &gatewayv1.Gateway{}, &gatewayv1.ListenerSet{}, &gatewayv1.HTTPRoute{},
		&gatewayv1.GRPCRoute{}, &gatewayv1.TLSRoute{}, &gatewayv1.TCPRoute{}, &gatewayv1.UDPRoute{},
		&gatewayv1.BackendTLSPolicy{},
	}
}

func (c *cluster) get(ctx context.Context, under client.WithWatch, key client.ObjectKey, object client.Object, opts ...client.GetOption) error {
	if err := under.Get(ctx, key, object, opts...); err != nil {
		return err
	}
	return c.fillStatus(object)
}

func (c *cluster) list(ctx context.Context, under client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
	if err := under.List(ctx, list, opts...); err != nil {
		return err
	}
	return meta.EachListItem(list, func(item runtime.Object) error {
		return c.fillStatus(item.(client.Object))
	})
}

func (c *cluster) fillStatus(object client.Object) error {
	kinds, _, err := c.Scheme().ObjectKinds(object)
	if err != nil || kinds[0].Group != gatewayv1.GroupName {
		return err
	}
	return c.status.fill(object, kinds[0].Kind)
}

func (c *cluster) create(ctx context.Context, under client.WithWatch, object client.Object, opts ...client.CreateOption) error {
	if err := c.defaults.set(object, c.Scheme()); err != nil {
		return err
	}
	object.SetGeneration(1)
	object.SetCreationTimestamp(metav1.Now())
	if err := c.apply(object); err != nil {
		return err
	}
	return under.Create(ctx, object, opts...)
}

func (c *cluster) update(ctx context.Context, under client.WithWatch, object client.Object, opts ...client.UpdateOption) error {
	if err := c.defaults.set(object, c.Scheme()); err != nil {
		return err
	}
	before := object.DeepCopyObject().(client.Object)
	if err := under.Get(ctx, client.ObjectKeyFromObject(object), before); err != nil {
		return err
	}
	if err := setGeneration(object, before); err != nil {
		return err
	}
	if err := c.apply(object); err != nil {
		return err
	}
	return under.Update(ctx, object, opts...)
}

func (c *cluster) patch(ctx context.Context, under client.WithWatch, object client.Object, patch client.Patch, opts ...client.PatchOption) error {
	before := object.DeepCopyObject().(client.Object)
	if err := under.Get(ctx, client.ObjectKeyFromObject(object), before); err != nil {
		return err
	}
	if err := under.Patch(ctx, object, patch, opts...); err != nil {
		return err
	}
	if err := c.defaults.set(object, c.Scheme()); err != nil {
		return err
	}
	if err := setGeneration(object, before); err != nil {
		return err
	}
	if err := under.Update(ctx, object); err != nil {
		return err
	}
	return c.apply(object)
}

// setGeneration gives the object the next generation if its spec is another one than before.
func setGeneration(object, before client.Object) error {
	after, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return err
	}
	old, err := runtime.DefaultUnstructuredConverter.ToUnstructured(before)
	if err != nil {
		return err
	}
	generation := before.GetGeneration()
	if !equality.Semantic.DeepEqual(old["spec"], after["spec"]) {
		generation++
	}
	object.SetGeneration(generation)
	object.SetCreationTimestamp(before.GetCreationTimestamp())
	return nil
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
	if err := c.change(object); err != nil {
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

// delete removes the object from the tenant, from wherever it was put.
func (c *cluster) delete(object client.Object) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.status.forget()
	kinds, _, err := c.Scheme().ObjectKinds(object)
	if err != nil {
		return err
	}
	object = object.DeepCopyObject().(client.Object)
	object.GetObjectKind().SetGroupVersionKind(kinds[0])
	key := keyOf(object)
	if c.fixed[key] || c.unknown[kinds[0].Kind] {
		return nil
	}
	if err := c.world.removeFile(fileOf(key)); err != nil {
		return err
	}
	return c.world.delete(kinds[0].Kind, object.GetNamespace(), object.GetName())
}

// change makes the object in the tenant. An API server keeps an object whose mistakes are conditions
// in its status. `canal apply` refuses it, so that it becomes a file of the tenant then: of files,
// Canal keeps such objects too. The refusal is remembered as the reason for what a test misses.
func (c *cluster) change(object client.Object) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.status.forget()
	written, err := c.written(object)
	if err != nil {
		return err
	}
	key := keyOf(written)
	if c.fixed[key] {
		return nil
	}
	text, err := yaml.Marshal(written.Object)
	if err != nil {
		return err
	}
	if c.world.hasFile(fileOf(key)) {
		return c.world.writeFile(fileOf(key), text, written)
	}
	answer, err := c.world.apply(text)
	if err == nil {
		c.unknown[written.GetKind()] = answer.isEmpty()
		return nil
	}
	if !answer.isRefused {
		return err
	}
	if c.refusal == "" {
		c.refusal = err.Error()
	}
	return c.world.writeFile(fileOf(key), text, written)
}

// fileOf returns the name of the file that has an object which Canal's API refuses. Names of objects
// can be too long for files.
func fileOf(key string) string {
	return fmt.Sprintf("%x.yaml", sha256.Sum256([]byte(key)))
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
	removeNulls(written.Object)
	address, _, _ := unstructured.NestedString(written.Object, "spec", "clusterIP")
	if written.GetKind() == "Service" && address == "" {
		c.services++
		err = setAddresses(written, c.services)
	}
	return written, err
}

// removeNulls removes the fields without a value, as an API server does.
func removeNulls(object map[string]any) {
	for name, value := range object {
		switch value := value.(type) {
		case nil:
			delete(object, name)
		case map[string]any:
			removeNulls(value)
		case []any:
			if value == nil {
				delete(object, name)
			}
			for _, item := range value {
				if item, ok := item.(map[string]any); ok {
					removeNulls(item)
				}
			}
		}
	}
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
			Spec:       corev1.PodSpec{NodeName: p.Node},
			Status: corev1.PodStatus{
				PodIP:      host.IPv4,
				PodIPs:     []corev1.PodIP{{IP: host.IPv4}},
				Phase:      corev1.PodRunning,
				Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}},
			},
		})
	}
	return pods, nil
}
